// Where kernels write what nccl_ep.record wants to know of an operation: words of the host's memory, 64 bits each.
#pragma once

#include <cstdint>

#include "base/math.h"

namespace ep {

struct RecordedWords {
  uint64_t* words = nullptr;  // null: nobody records
  uint32_t tag = 0;

  // kBegin: when the operation began. kBlocks: how many blocks its last kernel has. kEnds: when each of them ended.
  // kCounts: [R rows, E choices], each with `tag` in its upper half. Times are of the GPU's clock, 0 until they are
  // there.
  static constexpr int kMostBlocks = 256;
  enum Word : int { kBegin = 0, kBlocks = 1, kEnds = 2, kCounts = kEnds + kMostBlocks };

  EP_HD uint64_t count(int32_t value) const { return uint64_t{tag} << 32 | static_cast<uint32_t>(value); }
  EP_HD bool is_count(uint64_t word) const { return static_cast<uint32_t>(word >> 32) == tag; }
};

}  // namespace ep
