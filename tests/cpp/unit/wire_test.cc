// Tags, banks, records, id formats, row formats, and rows on their way through a bank.
#include "layout/common/wire.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "cpu/common/rows.h"

namespace ep {
namespace {

TEST(Tags, AreNeverThatOfANewWindowAndDifferBetweenNeighbours) {
  for (uint64_t epoch : {0ull, 1ull, 2ull, 0xFFFFFFFDull, 0xFFFFFFFEull, 0xFFFFFFFFull, 0x100000000ull, ~0ull - 4}) {
    std::set<uint32_t> tags;
    for (uint64_t next = epoch; next < epoch + 4; next++) {
      EXPECT_NE(tag_of(next), 0u) << next;
      EXPECT_NE(bank_of(next), bank_of(next + 1)) << next;
      tags.insert(tag_of(next));
    }
    EXPECT_EQ(tags.size(), 4u) << epoch;
  }
}

TEST(OpHeader, EveryWordBeforeTheTokensIsCompared) {
  EXPECT_EQ(OpHeader::kComparedWords, OpHeader::kNumTokens);
  EXPECT_LT(OpHeader::kNumTokens, OpHeader::kWords);
  // Where it differs, all that is compared before it does not.
  EXPECT_EQ(OpHeader::kLlHandle, OpHeader::kComparedWords - 1);
  OpHeader header;
  for (int i = 0; i < OpHeader::kWords; i++) {
    EXPECT_EQ(header.word(i), 0u);
    header.words[i] = 0xABC00000u + i;
    EXPECT_EQ(header.word(i), 0xABC00000u + i);
  }
}

TEST(OpHeader, OperationsDifferInEveryPart) {
  std::set<uint32_t> words;
  int combinations = 0;
  for (int operation = 1; operation <= 4; operation++) {
    for (int dtype = 0; dtype < 8; dtype++) {
      for (int quant = 0; quant < 8; quant++) {
        for (int wire = 0; wire < 3; wire++, combinations++) {
          words.insert(pack_operation(static_cast<Operation>(operation), static_cast<DType>(dtype),
                                      static_cast<Quant>(quant), static_cast<DType>(wire)));
        }
      }
    }
  }
  EXPECT_EQ(words.size(), static_cast<size_t>(combinations));
}

TEST(IdFormat, EveryIdAndNoneFit) {
  for (int local_experts : {1, 8, 253, 254, 255, 256, 1000, 65534}) {
    for (int topk = 1; topk <= 32; topk++) {
      const IdFormat ids = IdFormat::make(local_experts, topk);
      EXPECT_EQ(ids.bits, local_experts <= 254 ? 8 : 16);
      EXPECT_LT(static_cast<uint32_t>(local_experts - 1), ids.none());
      EXPECT_GE(ids.words() * ids.per_word(), topk);
      EXPECT_EQ(ids.words() % 2, 0);
      EXPECT_LE(ids.words(), 32);  // buffers on the stack count on it
      std::vector<uint32_t> words(ids.words(), 0);
      const auto code = [&](int k) {
        return k % 3 == 2 ? ids.none() : static_cast<uint32_t>(local_experts - 1) / (k + 1);
      };
      for (int k = 0; k < topk; k++) words[k / ids.per_word()] |= code(k) << (k % ids.per_word() * ids.bits);
      for (int k = 0; k < topk; k++) EXPECT_EQ(ids.get(words[k / ids.per_word()], k % ids.per_word()), code(k));
    }
  }
}

TEST(RowFormat, PartsDoNotOverlapAndStayAligned) {
  for (int payload = 16; payload <= 2048; payload += 16) {
    for (int scales : {0, 1, 4, 15, 16, 17, 100}) {
      for (bool is_keyed : {false, true}) {
        const RowFormat row{payload, scales, is_keyed};
        EXPECT_GE(row.scales_offset(), payload);
        EXPECT_GE(row.body_bytes(), row.scales_offset() + scales);
        EXPECT_GE(row.keys_offset(), row.body_bytes());
        EXPECT_GE(row.wire_bytes(), row.keys_offset() + row.num_keys() * 4);
        EXPECT_GE(row.num_keys() * kKeyBlockBytes, is_keyed ? row.body_bytes() : 0);
        EXPECT_EQ(row.num_keys() == 0, !is_keyed);
        EXPECT_EQ(row.keys_offset() % 16, 0);
        EXPECT_EQ(row.wire_bytes() % 16, 0);
        EXPECT_EQ(row.stride() % 128, 0);
        EXPECT_GE(row.stride(), row.wire_bytes());
        EXPECT_LT(row.stride(), row.wire_bytes() + 128);
      }
    }
  }
}

std::vector<uint32_t> encoded(const RowFormat& format, std::vector<uint32_t> words) {
  words.resize(format.wire_bytes() / 4, 0xDEADBEEF);
  encode_row(format, words.data());
  return words;
}

// No word of it may look as if it had not arrived, and a keyed row comes back with every bit.
void expect_travels(const RowFormat& format, const std::vector<uint32_t>& body) {
  std::vector<uint32_t> wire = encoded(format, body);
  for (uint32_t word : wire) ASSERT_NE(word, kAbsent);
  decode_row(format, wire.data());
  for (size_t i = 0; i < body.size(); i++) {
    const uint32_t expected = !format.is_keyed && body[i] == 0xFFFFFFFFu ? 0xFFFFFFFEu : body[i];
    ASSERT_EQ(wire[i], expected) << "word " << i << " of " << body.size();
  }
}

TEST(Rows, AwkwardWordsTravel) {
  std::mt19937 random(1);
  for (int payload : {16, 32, 496, 512, 528, 1024, 14336, 65536}) {
    for (int scales : {0, 4, 60}) {
      for (bool is_keyed : {false, true}) {
        const RowFormat format{payload, scales, is_keyed};
        const size_t count = format.body_bytes() / 4;
        for (uint32_t word : {kAbsent, kAbsent - 1, 0u, 0x80808080u}) {
          expect_travels(format, std::vector<uint32_t>(count, word));
        }
        for (int trial = 0; trial < 8; trial++) {
          std::vector<uint32_t> body(count);
          for (uint32_t& word : body) word = random() % 2 ? kAbsent - random() % 130 : random();
          expect_travels(format, body);
        }
      }
    }
  }
}

TEST(Rows, TheLastKeyIsTakenWhereABlockRulesOutTheOthers) {
  const RowFormat format{2 * kKeyBlockBytes, 0, true};
  std::vector<uint32_t> body(2 * kKeyBlockWords);
  for (int i = 0; i < kKeyBlockWords; i++) body[i] = kAbsent ^ static_cast<uint32_t>(i);
  expect_travels(format, body);
  const std::vector<uint32_t> wire = encoded(format, body);
  EXPECT_EQ(wire[format.keys_offset() / 4], 128u);
  EXPECT_EQ(wire[format.keys_offset() / 4 + 1], 0u);  // each block has its own key
}

TEST(Rows, TheSmallestKeyIsTaken) {
  const RowFormat format{16, 0, true};
  EXPECT_EQ(encoded(format, {1, 2, 3, 4})[4], 0u);
  EXPECT_EQ(encoded(format, {kAbsent, 2, 3, 4})[4], 1u);
  EXPECT_EQ(encoded(format, {kAbsent, kAbsent ^ 1u, kAbsent ^ 3u, 4})[4], 2u);
}

}  // namespace
}  // namespace ep
