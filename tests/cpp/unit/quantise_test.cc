// FP8 rows against the words of docs/semantics.md, with logarithms and searches instead of bits.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/convert.h"
#include "cpu/common/rows.h"
#include "unit/number_search.h"

namespace ep {
namespace {

struct ScaledGroup {
  float scale;
  int exponent;
  float factor;
};

ScaledGroup group_of(Quant quant, const float* row, int count) {
  float amax = 1e-4f;
  for (int i = 0; i < count; i++) {
    if (!std::isnan(row[i]) && std::fabs(row[i]) > amax) amax = std::fabs(row[i]);
  }
  if (quant == Quant::kFp8) return {amax * (1.0f / 448.0f), 0, 448.0f / amax};
  int exponent = 127;
  if (std::isfinite(amax)) {
    const float mantissa = std::frexp(amax * (1.0f / 448.0f), &exponent);  // in [1/2, 1)
    exponent = std::min(std::max(mantissa == 0.5f ? exponent - 1 : exponent, -126), 127);
  }
  return {std::ldexp(1.0f, exponent), exponent, std::ldexp(1.0f, -exponent)};
}

uint8_t code_of(float value) {
  if (std::isnan(value)) return 0x7F;
  return static_cast<uint8_t>((std::signbit(value) ? 0x80 : 0) | e4m3_numbers().nearest(value));
}

void expect_quantised(Quant quant, const std::vector<float>& row) {
  const int hidden = static_cast<int>(row.size()), groups = (hidden + 127) / 128;
  std::vector<uint8_t> payload(hidden, 0xEE);
  std::vector<uint32_t> scales(groups + 1, 0xEEEEEEEE);
  quantize_row(quant, row.data(), hidden, payload.data(), scales.data());
  const int scale_words = quant == Quant::kFp8Ue8m0 ? (groups + 3) / 4 : groups;
  EXPECT_EQ(quant_scale_bytes(quant, hidden), scale_words * 4);
  EXPECT_EQ(scales[scale_words], 0xEEEEEEEE);  // nothing is written past the end
  for (int g = 0; g < groups; g++) {
    const int begin = g * 128, end = std::min(begin + 128, hidden);
    const ScaledGroup expected = group_of(quant, row.data() + begin, end - begin);
    if (quant == Quant::kFp8Ue8m0) {
      ASSERT_EQ(scales[g / 4] >> (g % 4 * 8) & 0xFF, static_cast<uint32_t>(expected.exponent + 127));
    } else {
      ASSERT_EQ(scales[g], std::bit_cast<uint32_t>(expected.scale));
    }
    for (int i = begin; i < end; i++) ASSERT_EQ(payload[i], code_of(row[i] * expected.factor)) << "element " << i;
  }
  for (int g = groups; quant == Quant::kFp8Ue8m0 && g < scale_words * 4; g++) {
    ASSERT_EQ(scales[g / 4] >> (g % 4 * 8) & 0xFF, 0u) << "padding of the scales";
  }
  for (size_t i = 0; i + 4 <= payload.size(); i += 4) {  // such rows travel without keys
    uint32_t word;
    std::memcpy(&word, payload.data() + i, 4);
    ASSERT_NE(word, kAbsent);
  }
  for (int i = 0; i < scale_words; i++) ASSERT_NE(scales[i], kAbsent);
}

TEST(Quantise, RandomRowsAreQuantisedByTheRule) {
  std::mt19937 random(5);
  for (Quant quant : {Quant::kFp8, Quant::kFp8Rounded, Quant::kFp8Ue8m0}) {
    for (int hidden : {16, 112, 128, 144, 512, 528, 7168}) {
      for (int trial = 0; trial < 20; trial++) {
        std::vector<float> row(hidden);
        const int magnitude = static_cast<int>(random() % 60) - 40;
        for (float& value : row) {
          value = bf16_to_float(float_to_bf16(std::ldexp(static_cast<float>(random() % 4001) - 2000, magnitude)));
        }
        ASSERT_NO_FATAL_FAILURE(expect_quantised(quant, row)) << name_of(quant) << ", hidden " << hidden;
      }
      for (int trial = 0; trial < 5; trial++) {  // any bits: NaN, infinities, subnormals
        std::vector<float> row(hidden);
        for (float& value : row) value = bf16_to_float(static_cast<uint16_t>(random()));
        ASSERT_NO_FATAL_FAILURE(expect_quantised(quant, row)) << name_of(quant) << ", hidden " << hidden;
      }
    }
  }
}

TEST(Quantise, SpecialRowsAreQuantisedByTheRule) {
  for (Quant quant : {Quant::kFp8, Quant::kFp8Rounded, Quant::kFp8Ue8m0}) {
    for (float value : {0.0f, -0.0f, 1.0f, 448.0f, 449.0f, 1e-4f, 9e-5f, 3.3895314e38f, INFINITY, -INFINITY, NAN,
                        1e-40f, 7.0f, 3.5f}) {
      ASSERT_NO_FATAL_FAILURE(expect_quantised(quant, std::vector<float>(144, value))) << value;
    }
  }
}

TEST(Floats, RowsOfEveryTypeRoundTrip) {
  const std::vector<float> row{0.0f, -0.0f, 1.0f, -2.5f, 65504.0f, 0.0009765625f};
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    std::vector<uint32_t> memory(row.size());
    std::vector<float> first(row.size()), second(row.size());
    from_floats(dtype, row.data(), memory.data(), static_cast<int>(row.size()));
    to_floats(dtype, memory.data(), first.data(), static_cast<int>(row.size()));
    from_floats(dtype, first.data(), memory.data(), static_cast<int>(row.size()));
    to_floats(dtype, memory.data(), second.data(), static_cast<int>(row.size()));
    EXPECT_EQ(first, second) << name_of(dtype);
    EXPECT_EQ(first[3], -2.5f);
    EXPECT_EQ(first[4], dtype == DType::kBF16 ? 65536.0f : 65504.0f);
  }
}

}  // namespace
}  // namespace ep
