// MXFP8 and NVFP4: scales and codes beside arithmetic in double, words on the wire, the order of swizzled scales.
#include "layout/common/small_blocks.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "base/convert.h"
#include "cpu/common/rows.h"

namespace ep {
namespace {

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// Every bf16 magnitude as a block's largest.
TEST(SmallBlocks, MxScaleIsTheLeastPowerOfTwo) {
  for (uint32_t bits = 0; bits < 0x7F80; bits++) {
    const double amax = std::bit_cast<float>(bits << 16);
    const uint32_t scale = mx_scale(bits << 16);
    const double power = std::ldexp(1.0, static_cast<int>(scale) - 127);
    ASSERT_LE(amax, 448 * power) << bits;
    if (scale > 0) {
      ASSERT_GT(amax, 448 * power / 2) << bits;
      ASSERT_EQ(std::bit_cast<float>(mx_factor(scale)), static_cast<float>(1 / power)) << bits;
    }
  }
  EXPECT_EQ(mx_scale(bits_of(std::numeric_limits<float>::infinity())), 254u);
  EXPECT_EQ(std::bit_cast<float>(mx_factor(254)), 0x1p-127f);
  EXPECT_EQ(std::bit_cast<float>(mx_factor(0)), 1.0f);
}

// Every bf16 number, and what lies beside the middles between two codes.
TEST(SmallBlocks, E2m1IsTheNearestEven) {
  constexpr float kNumbers[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const auto expect_nearest = [&](float value) {
    const float size = std::fabs(value);
    uint32_t best = 0;
    for (uint32_t code = 1; code < 8; code++) {
      const double here = std::fabs(static_cast<double>(kNumbers[code]) - size);
      const double before = std::fabs(static_cast<double>(kNumbers[best]) - size);
      if (here < before || (here == before && code % 2 == 0)) best = code;
    }
    if (size >= 6) best = 7;
    ASSERT_EQ(e2m1_of(bits_of(value)), best | (std::signbit(value) ? 8u : 0u)) << value;
  };
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    const float value = std::bit_cast<float>(bits << 16);
    if (!std::isnan(value)) expect_nearest(value);
  }
  for (float middle : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) {
    for (float value : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 9.0f)}) {
      expect_nearest(value);
      expect_nearest(-value);
    }
  }
  EXPECT_EQ(e2m1_of(bits_of(-std::numeric_limits<float>::quiet_NaN())), 0u);
}

TEST(SmallBlocks, EscapedWordsHaveArrivedAndComeBack) {
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (uint32_t first : {0u, 1u, 2u, 77u, kAbsent - 1, kAbsent}) {
    for (uint32_t second : {0u, 1u, 2u, 77u, kAbsent - 1, kAbsent}) {
      uint32_t a = first, b = second;
      const bool is_escaped = escape_block(a, b);
      EXPECT_NE(a, kAbsent);
      EXPECT_NE(b, kAbsent);
      EXPECT_EQ(is_escaped, first == kAbsent || second == kAbsent);
      if (!is_escaped) continue;
      EXPECT_TRUE(seen.insert({a, b}).second) << "two blocks travel alike";
      unescape_block(a, b);
      EXPECT_EQ(a, first);
      EXPECT_EQ(b, second);
    }
  }
}

TEST(SmallBlocks, RowsOfOnesTravelAndComeBack) {
  constexpr int kHidden = 96;
  std::vector<float> row(kHidden, -3.0f);
  for (int i = 40; i < 48; i++) row[i] = 1.5f;
  std::vector<uint32_t> payload(kHidden / 8), scales(2);
  auto* bytes = reinterpret_cast<uint8_t*>(scales.data());
  quantize_row(Quant::kNvfp4, row.data(), kHidden, reinterpret_cast<uint8_t*>(payload.data()), bytes, 2.0f);
  const auto codes = payload;
  const std::vector<uint8_t> plain(bytes, bytes + 6);
  EXPECT_EQ(codes[0], kAbsent) << "eight times -6";
  EXPECT_EQ(plain[0], float_to_e4m3(2.0f * (3.0f * (1.0f / 6.0f))));
  escape_nvfp4(payload.data(), bytes, 6);
  for (uint32_t word : payload) EXPECT_NE(word, kAbsent);
  for (uint32_t word : scales) EXPECT_NE(word, kAbsent);
  unescape_nvfp4(payload.data(), bytes, 6);
  EXPECT_EQ(payload, codes);
  EXPECT_EQ(std::vector<uint8_t>(bytes, bytes + 6), plain);
}

TEST(SmallBlocks, EverySwizzledWordHasItsOwnPlace) {
  constexpr int kRows = 256, kWords = 3;
  std::set<int64_t> places;
  for (int row = 0; row < kRows; row++) {
    for (int word = 0; word < kWords; word++) places.insert(swizzled_word(row, word, kWords));
  }
  EXPECT_EQ(places.size(), static_cast<size_t>(kRows * kWords));
  EXPECT_EQ(*places.begin(), 0);
  EXPECT_EQ(*places.rbegin(), kRows * kWords * 4 - 4);
  EXPECT_EQ(swizzled_word(33, 0, kWords), 16 + 4);
  EXPECT_EQ(swizzled_word(128, 1, kWords), (kWords + 1) * kScaleTileBytes);
}

}  // namespace
}  // namespace ep
