// What tells a consumer on the same device which blocks of rows of a dispatch lie at their place, while others still
// come. All of it is the caller's memory, which was zero before the first operation and is never cleared.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/math.h"
#include "layout/common/outputs.h"

namespace ep {

// int32 words: a header, then tables with an entry a block, then the blocks in the order in which they have arrived.
struct Arrivals {
  int32_t* state = nullptr;  // null: nobody asks
  int blocks = 0;            // that the tables have room for
  int rows_per_block = 1;

  // Header. kExpected: what the words of this operation become; the caller counts it up before. kFailed: becomes that
  // where the operation gives up. kDrawn: places of the order that are taken. kClock: 64 bits, the consumers' own.
  // kPlan: 64 bits, how many blocks have rows, and behind it kExpected once kRows, kFirst and kExperts of all are
  // there.
  enum Word : int { kExpected = 0, kFailed = 1, kDrawn = 2, kClock = 4, kPlan = 6, kHeader = 16 };
  // Tables. kWords: kExpected once all rows of the block lie at their place. kRows, kFirst, kExperts: of a block whose
  // word has come, and of all once kPlan has: how many rows it has, the first of them, and their expert. kMissing: rows
  // that have come less those that are to come; 0 between operations.
  enum Table : int { kWords = 0, kRows = 1, kFirst = 2, kExperts = 3, kMissing = 4, kTables = 5 };
  static constexpr int kMostBlocks = 65535;

  EP_HD int32_t* header(Word word) const { return state + word; }
  EP_HD int32_t* entry(Table table, int block) const { return state + kHeader + table * blocks + block; }
  EP_HD int64_t* plan() const { return reinterpret_cast<int64_t*>(header(kPlan)); }
  // Entry of the order: the block, and behind it kExpected. Blocks without rows stand last.
  EP_HD int64_t* order(int place) const {
    return reinterpret_cast<int64_t*>(state + kHeader + align_up(kTables * blocks, 2)) + place;
  }
  static int64_t words_for(int64_t blocks) { return kHeader + align_up<int64_t>(kTables * blocks, 2) + 2 * blocks; }

  // A word that tells `value` of the operation in which words become `expected`.
  EP_HD static int64_t told(int32_t expected, int value) {
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(expected)) << 32 |
                                static_cast<uint32_t>(value));
  }

  EP_HD int per_expert(const OutputShape& output) const {
    return static_cast<int>((output.capacity + rows_per_block - 1) / rows_per_block);
  }
  // Blocks of an output. A block has rows of one expert.
  EP_HD int blocks_of(const OutputShape& output) const {
    return per_expert(output) * (output.layout == OutputLayout::kExpertMajor ? output.local_experts : 1);
  }
  EP_HD int block_of(const OutputShape& output, int row) const {
    if (output.layout != OutputLayout::kExpertMajor) return row / rows_per_block;
    const int capacity = static_cast<int>(output.capacity), expert = row / capacity;
    return expert * per_expert(output) + (row - expert * capacity) / rows_per_block;
  }

  struct Block {
    int number, rows, first;
  };
  // Calls take(Block) for each block of an expert: `start` and `next` are first rows of this expert and the next one in
  // a packed output, `kept` its rows. There expert -1 stands for what is behind the last one.
  template <class Take>
  EP_HD void for_blocks_of(const OutputShape& output, int expert, int64_t start, int64_t next, int kept,
                           const Take& take) const {
    const int per_expert = this->per_expert(output);
    int number = expert * per_expert, end = number + per_expert;
    int first = expert * static_cast<int>(output.capacity);
    if (output.layout != OutputLayout::kExpertMajor) {
      const int64_t from = start < output.capacity ? start : output.capacity;
      const int64_t to = next < output.capacity ? next : output.capacity;
      number = static_cast<int>((from + rows_per_block - 1) / rows_per_block);
      end = static_cast<int>((to + rows_per_block - 1) / rows_per_block);
      first = static_cast<int>(from);
    }
    for (int rest = kept; number < end; number++, first += rows_per_block, rest -= rows_per_block) {
      take(Block{number, rest < 0 ? 0 : rest < rows_per_block ? rest : rows_per_block, first});
    }
  }
  void check(const OutputShape& output) const {
    EP_CHECK(has_expert_rows(output.layout), "arrivals are for layouts of experts' rows, not for ",
             name_of(output.layout));
    EP_CHECK(output.layout != OutputLayout::kPacked || output.alignment % rows_per_block == 0, "expert_alignment is ",
             output.alignment, ", must be a multiple of the ", rows_per_block, " rows of a block of arrivals");
    EP_CHECK(blocks_of(output) <= blocks, "arrivals have room for ", blocks, " blocks of ", rows_per_block,
             " rows, the output has ", blocks_of(output));
  }
};

}  // namespace ep
