// When a block of a dispatch with masks reads the routing again.
#include <gtest/gtest.h>

#include "cuda/protocol/device_state.h"

namespace ep {
namespace {

TEST(MaskConsensus, ABlockReadsTheRoutingAgainWhereItLeftOutOthersThanTheFirstOrThanItBeganWith) {
  constexpr uint32_t kOne = 1 << 3, kOther = 1 << 5;
  EXPECT_EQ(Masks::differences(0, 0, 0), 0u);
  EXPECT_EQ(Masks::differences(kOne, kOne, kOne), 0u) << "masked before";
  EXPECT_EQ(Masks::differences(0, kOne, 0), kOne) << "the first block has left it out";
  EXPECT_EQ(Masks::differences(kOne, kOne, 0), kOne) << "it was late for both";
  EXPECT_EQ(Masks::differences(kOne, 0, 0), kOne) << "it was late for this block alone";
  EXPECT_EQ(Masks::differences(kOne, 0, kOne), kOne) << "the first block heard it, and then it was masked";
  EXPECT_EQ(Masks::differences(kOne | kOther, kOne, kOne), kOther);
}

}  // namespace
}  // namespace ep
