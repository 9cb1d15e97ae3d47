// The formats of partial sums (layout/common/block_formats.h), as rows on the host have them.
#include "layout/common/block_formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/convert.h"
#include "cpu/common/rows.h"

namespace ep {
namespace {

constexpr DType kFormats[] = {DType::kFp8Blocks, DType::kLogFmt};

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

std::vector<uint32_t> encoded(DType format, const std::vector<float>& row) {
  std::vector<uint32_t> words(wire_row_bytes(format, static_cast<int>(row.size())) / 4, 0);
  from_floats(format, row.data(), words.data(), static_cast<int>(row.size()));
  return words;
}

std::vector<float> decoded(DType format, const std::vector<uint32_t>& words, size_t hidden) {
  std::vector<float> row(hidden);
  to_floats(format, words.data(), row.data(), static_cast<int>(hidden));
  return row;
}

std::vector<float> rounded(DType format, const std::vector<float>& row) {
  return decoded(format, encoded(format, row), row.size());
}

TEST(BlockFormats, ARowHasTheBytesOfItsBlocks) {
  EXPECT_EQ(wire_row_bytes(DType::kBF16, 7168), 14336);
  EXPECT_EQ(wire_row_bytes(DType::kFp8Blocks, 7168), 7168 + 4 * 56);
  EXPECT_EQ(wire_row_bytes(DType::kLogFmt, 7168), 7168 * 5 / 4 + 4 * 56);
  EXPECT_EQ(wire_row_bytes(DType::kFp8Blocks, 144), 144 + 16);    // two headers, padded
  EXPECT_EQ(wire_row_bytes(DType::kLogFmt, 144), 144 + 36 + 12);  // 188 bytes, padded
}

TEST(BlockFormats, E4m3IsExact) {
  for (int code = 0; code < 256; code++) {
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(float_to_e4m3(value), code);
      EXPECT_EQ(std::signbit(value), code >= 128);
    }
  }
}

TEST(Logfmt, LogarithmsAreMonotoneAndPrecise) {
  uint32_t last_log = 0, last_number = 0;
  for (uint32_t x = 0; x < logfmt::kOctave; x++) {
    const double fraction = x / 65536.0;
    const uint32_t log = x + logfmt::log_above_line(x), number = x - logfmt::exp_below_line(x);
    ASSERT_NEAR(log / 65536.0, std::log2(1 + fraction), 3.1e-5);
    ASSERT_NEAR(number / 65536.0, std::exp2(fraction) - 1, 3.1e-5);
    ASSERT_GE(log, last_log);
    ASSERT_GE(number, last_number);
    ASSERT_LT(log, logfmt::kOctave);
    ASSERT_LT(number, logfmt::kOctave);
    last_log = log;
    last_number = number;
  }
}

TEST(Logfmt, ACodeIsTheNearest) {
  std::mt19937 random(7);
  for (int round = 0; round < 20000; round++) {
    const uint32_t most = logfmt::kSmallest + random() % (logfmt::kEnd - logfmt::kSmallest);
    const uint32_t least = most - random() % (random() % 4 == 0 ? 64u : most - logfmt::kSmallest + 1);
    const auto scale = logfmt::Scale::of(least, most);
    ASSERT_EQ(logfmt::Scale::of_header(scale.header()).first, scale.first);
    ASSERT_EQ(logfmt::Scale::of_header(scale.header()).step, scale.step);
    const uint32_t bits = logfmt::magnitude_of(scale.first + random() % (most - scale.first + 1));
    const uint32_t log = logfmt::log_of(bits);
    const uint32_t code = logfmt::code_of(logfmt::signed_log_of(bits), scale, 0xFFFFFFFFu / scale.step);
    ASSERT_GE(code, 1u);
    ASSERT_LE(code, logfmt::kLastCode);
    const uint32_t steps = log <= scale.first ? 0 : (log - scale.first + scale.step / 2) / scale.step;
    ASSERT_EQ(code, 1 + std::min(steps, logfmt::kIntervals));
  }
}

TEST(Logfmt, CodesArePackedAndNoWordIsAbsent) {
  std::mt19937 random(11);
  for (int round = 0; round < 20000; round++) {
    uint32_t codes[kEight];
    for (uint32_t& code : codes) {
      const bool is_last = round % 3 == 0;
      code = (is_last ? 1 : random() % 2) << 9 | (is_last ? logfmt::kLastCode : random() % (logfmt::kLastCode + 1));
    }
    const auto eight = logfmt::Eight::pack(codes);
    for (int i = 0; i < kEight; i++) ASSERT_EQ(eight.code(i), codes[i]);
    ASSERT_NE(eight.words[0], kAbsent);
    ASSERT_NE(eight.words[1], kAbsent);
    ASSERT_LE(eight.half, 0xFEFEu);
  }
}

TEST(BlockFormats, ZerosAndALonePowerOfTwoAreExact) {
  std::vector<float> row(144, 0.0f);
  row[3] = -0.0f;
  for (const DType format : kFormats) {
    const auto zeros = rounded(format, row);
    for (size_t i = 0; i < row.size(); i++) EXPECT_EQ(bits_of(zeros[i]), bits_of(row[i]));
  }
  std::fill(row.begin(), row.end(), 0.25f);
  row[5] = -0.25f;
  EXPECT_EQ(rounded(DType::kLogFmt, row), row);  // a power of two alone in its block
}

TEST(BlockFormats, ErrorsAreWithinTheBounds) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 400; round++) {
    std::vector<float> row(round % 2 == 0 ? 256 : 144);
    const float spread = std::exp2(static_cast<float>(round % 50)), size = std::exp2(static_cast<float>(round % 9));
    for (float& value : row) value = normal(random) * size * std::exp2(-std::fabs(normal(random)) * spread / 16);
    const auto fp8 = rounded(DType::kFp8Blocks, row), log = rounded(DType::kLogFmt, row);
    for (size_t first = 0; first < row.size(); first += kBlockElements) {
      const size_t end = std::min(row.size(), first + kBlockElements);
      float most = 0;
      for (size_t i = first; i < end; i++) most = std::max(most, std::fabs(row[i]));
      for (size_t i = first; i < end; i++) {
        EXPECT_LE(std::fabs(fp8[i] - row[i]), std::max(most, 1e-4f) / 27.99f);
        EXPECT_LE(std::fabs(log[i] - row[i]), std::max({std::fabs(row[i]) / 44, most * 0x1p-32f, 0x1p-126f}));
      }
    }
  }
}

TEST(BlockFormats, NoWordIsAbsent) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float most = std::numeric_limits<float>::max();
  for (const float value : {infinity, -infinity, nan, -nan, most, -most, -1.0f, 0x1p-126f, -0x1p-149f, -0.0f}) {
    for (const float other : {value, 1.0f}) {
      std::vector<float> row(256, value);
      std::fill(row.begin() + 64, row.end(), other);
      for (const DType format : kFormats) {
        const auto words = encoded(format, row);
        for (const uint32_t word : words) ASSERT_NE(word, kAbsent) << value << " " << name_of(format);
        const auto back = decoded(format, words, row.size());
        EXPECT_EQ(std::isfinite(back[0]), std::isfinite(value));
        EXPECT_TRUE(!std::isinf(value) || std::isnan(back[100]));  // of the same block
        EXPECT_TRUE(other != 1.0f || back[200] == 1.0f);
      }
      if (std::isnan(value) && other == 1.0f) {
        EXPECT_EQ(rounded(DType::kFp8Blocks, row)[100], 1.0f);  // NaN does not count in the scale
        EXPECT_TRUE(std::isnan(rounded(DType::kLogFmt, row)[100]));
      }
    }
  }
}

}  // namespace
}  // namespace ep
