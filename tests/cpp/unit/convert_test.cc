// Number formats against lists of their values.
#include "base/convert.h"

#include <gtest/gtest.h>

#include <random>

#include "unit/number_search.h"

namespace ep {
namespace {

TEST(Convert, ListsHaveTheExpectedCodes) {
  EXPECT_EQ(bf16_numbers().num_finite(), 0x7F80);
  EXPECT_EQ(f16_numbers().num_finite(), 0x7C00);
  EXPECT_EQ(e4m3_numbers().num_finite(), 0x7F);
}

// Every number of 16 bits, infinities (code `infinity`) and NaNs (the codes beyond it) included.
template <class ToFloat, class FromFloat>
void expect_round_trips(ToFloat to_float, FromFloat from_float, int infinity, const NumberList& numbers) {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    const float value = to_float(static_cast<uint16_t>(bits));
    const int code = bits & 0x7FFF;
    if (code > infinity) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_GT(from_float(value) & 0x7FFF, infinity) << bits;
      continue;
    }
    ASSERT_EQ(std::signbit(value), bits >> 15 != 0) << bits;
    ASSERT_EQ(std::fabs(value), code == infinity ? INFINITY : static_cast<float>(numbers.value(code))) << bits;
    ASSERT_EQ(from_float(value), bits);
  }
}

TEST(Convert, EveryBf16RoundTrips) { expect_round_trips(bf16_to_float, float_to_bf16, 0x7F80, bf16_numbers()); }

TEST(Convert, EveryF16RoundTrips) { expect_round_trips(f16_to_float, float_to_f16, 0x7C00, f16_numbers()); }

TEST(Convert, EveryE4m3RoundTrips) {
  for (int code = 0; code < 0x7F; code++) {
    const float value = static_cast<float>(e4m3_numbers().value(code));
    ASSERT_EQ(float_to_e4m3(value), code);
    ASSERT_EQ(float_to_e4m3(-value), code | 0x80);
  }
  EXPECT_EQ(float_to_e4m3(NAN), 0x7F);
  EXPECT_EQ(float_to_e4m3(INFINITY), 0x7E);
  EXPECT_EQ(float_to_e4m3(-INFINITY), 0xFE);
  EXPECT_EQ(float_to_e4m3(449.0f), 0x7E);
}

// All three conversions of one float.
void expect_nearest(float value) {
  const uint32_t sign = std::signbit(value) ? 1 : 0;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) {
    ASSERT_GT(float_to_bf16(value) & 0x7FFF, 0x7F80) << bits;
    ASSERT_GT(float_to_f16(value) & 0x7FFF, 0x7C00) << bits;
    ASSERT_EQ(float_to_e4m3(value) & 0x7F, 0x7F) << bits;
    return;
  }
  ASSERT_EQ(float_to_bf16(value), sign << 15 | static_cast<uint32_t>(bf16_numbers().nearest(value))) << bits;
  ASSERT_EQ(float_to_f16(value), sign << 15 | static_cast<uint32_t>(f16_numbers().nearest(value))) << bits;
  ASSERT_EQ(float_to_e4m3(value), sign << 7 | static_cast<uint32_t>(e4m3_numbers().nearest(value))) << bits;
}

TEST(Convert, RoundsEverySixteenBitInputToTheNearest) {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    ASSERT_NO_FATAL_FAILURE(expect_nearest(std::bit_cast<float>(bits << 16)));
    ASSERT_NO_FATAL_FAILURE(expect_nearest(f16_to_float(static_cast<uint16_t>(bits))));
  }
}

TEST(Convert, RoundsRandomFloatsToTheNearest) {
  std::mt19937 random(4);
  for (int i = 0; i < 500000; i++) {
    ASSERT_NO_FATAL_FAILURE(expect_nearest(std::bit_cast<float>(static_cast<uint32_t>(random()))));
  }
}

// Halfway between two neighbours, and one float to either side.
TEST(Convert, TiesGoToTheEvenNeighbour) {
  for (const NumberList* list : {&bf16_numbers(), &f16_numbers(), &e4m3_numbers()}) {
    for (int code = 0; code < list->num_finite(); code++) {
      const float middle = static_cast<float>((list->value(code) + list->value(code + 1)) / 2);
      for (float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY), -middle}) {
        ASSERT_NO_FATAL_FAILURE(expect_nearest(value));
      }
    }
  }
}

}  // namespace
}  // namespace ep
