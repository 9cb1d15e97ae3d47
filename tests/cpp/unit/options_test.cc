// The table of options: kinds, ranges, modes, and the numbers that travel.
#include "runtime/options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace ep {
namespace {

#define EP_TEST_OPTIONS(OPTION)                                        \
  OPTION(bool, is_on, true, false, true, Modes::kBoth)                 \
  OPTION(int, blocks, 0, 2, 9, Modes::kLl)                             \
  OPTION(int64_t, rows, 0, 1, kMost, Modes::kBoth)                     \
  OPTION(float, factor, 1.0f, -2.5f, 4.0f, Modes::kHt)                 \
  OPTION(float, finite, 1.0f, -__FLT_MAX__, __FLT_MAX__, Modes::kBoth) \
  OPTION(Quant, quant, Quant::kNone, Quant::kNone, Quant::kNvfp4Swizzled, Modes::kBoth)
EP_OPTIONS(TestOptions, EP_TEST_OPTIONS)

enum { kIsOn, kBlocks, kRows, kFactor, kFinite, kQuant };

// What unpack() says of one number that is changed; empty: it is taken.
std::string refusal(int at, int64_t number) {
  auto numbers = TestOptions{}.pack();
  numbers[at] = number;
  try {
    TestOptions::unpack(numbers.data());
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    return error.what();
  }
  return "";
}

std::string refusal(const TestOptions& options, Modes mode) {
  try {
    options.check(mode);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Options, TypesTellTheKind) {
  const OptionKind kinds[] = {OptionKind::kFlag,  OptionKind::kInteger, OptionKind::kInteger,
                              OptionKind::kFloat, OptionKind::kFloat,   OptionKind::kChoice};
  for (size_t i = 0; i < TestOptions::kTable.size(); i++) EXPECT_EQ(TestOptions::kTable[i].kind, kinds[i]) << i;
  EXPECT_STREQ(TestOptions::kTable[kFactor].name, "factor");
  EXPECT_EQ(TestOptions::kTable[kFactor].modes, Modes::kHt);
}

TEST(Options, NumbersComeBackAsTheyWerePacked) {
  const TestOptions given{false, 9, int64_t{1} << 40, -0.0f, 2.5f, Quant::kFp8Rounded};
  const auto numbers = given.pack();
  EXPECT_EQ(numbers[kFactor], 0x80000000);
  EXPECT_EQ(numbers[kFinite], 0x40200000);
  const TestOptions back = TestOptions::unpack(numbers.data());
  EXPECT_EQ(back.pack(), numbers);
  EXPECT_TRUE(std::signbit(back.factor));
  EXPECT_EQ(back.finite, 2.5f);
  EXPECT_EQ(back.quant, Quant::kFp8Rounded);
  EXPECT_FALSE(back.is_on);
}

TEST(Options, ANumberOutOfRangeIsRefusedWithItsNameItsValueAndTheRange) {
  EXPECT_EQ(refusal(kIsOn, 2), "is_on is 2, must be 0 or 1");
  EXPECT_EQ(refusal(kBlocks, 10), "blocks is 10, must be from 2 to 9");
  EXPECT_EQ(refusal(kBlocks, int64_t{1} << 32 | 3), "blocks is 4294967299, must be from 2 to 9");
  EXPECT_EQ(refusal(kRows, -3), "rows is -3, must be at least 1");
  EXPECT_EQ(refusal(kFactor, to_number(4.5f)), "factor is 4.5, must be from -2.5 to 4");
  EXPECT_EQ(refusal(kFactor, to_number(std::nanf(""))), "factor is nan, must be from -2.5 to 4");
  EXPECT_EQ(refusal(kFinite, to_number(INFINITY)), "finite is inf, must be a finite number");
  EXPECT_EQ(refusal(kFinite, to_number(std::nanf(""))), "finite is nan, must be a finite number");
  EXPECT_EQ(refusal(kQuant, 8), "quant 8 is unknown, must be from 0 to 7");
  EXPECT_EQ(refusal(kQuant, -1), "quant -1 is unknown, must be from 0 to 7");
}

TEST(Options, TheEndsOfARangeAndTheDefaultAreTaken) {
  for (const int64_t number : {0, 2, 9}) EXPECT_EQ(refusal(kBlocks, number), "");
  for (const float value : {-2.5f, 4.0f, 0.0f}) EXPECT_EQ(refusal(kFactor, to_number(value)), "");
  EXPECT_EQ(refusal(kRows, INT64_MAX), "");
  EXPECT_EQ(refusal(kFinite, to_number(-__FLT_MAX__)), "");
}

TEST(Options, AModeHasItsOwnOptionsOnly) {
  EXPECT_EQ(refusal(TestOptions{}, Modes::kLl), "");
  EXPECT_EQ(refusal(TestOptions{}, Modes::kHt), "");
  EXPECT_EQ(refusal({.blocks = 3}, Modes::kLl), "");
  EXPECT_EQ(refusal({.blocks = 3}, Modes::kHt), "blocks is 3, but high throughput has no such option");
  EXPECT_EQ(refusal({.factor = 2.0f}, Modes::kLl), "factor is 2, but low latency has no such option");
  EXPECT_EQ(refusal({.blocks = 1}, Modes::kHt), "blocks is 1, must be from 2 to 9");
}

TEST(Options, AConfigIsTheRoutingAndThenTheOptions) {
  const CombineConfig config{{.num_experts = 8, .topk = 2, .max_tokens = 3, .layout = OutputLayout::kFlat},
                             {.weighting = Weighting::kHome, .num_sms = 5}};
  const auto numbers = config.pack();
  ASSERT_EQ(numbers.size(), RoutingNumbers::kTable.size() + CombineOptions::kTable.size());
  EXPECT_EQ((std::vector<int64_t>(numbers.begin(), numbers.begin() + 6)), (std::vector<int64_t>{8, 2, 3, 3, 1, 2}));
  const CombineConfig back = CombineConfig::unpack(numbers);
  EXPECT_EQ(back.pack(), numbers);
  EXPECT_EQ(back.num_sms, 5);
  EXPECT_THROW(CombineConfig::unpack(std::span(numbers).first(numbers.size() - 1)), Error);
}

}  // namespace
}  // namespace ep
