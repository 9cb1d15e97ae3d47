// Sets of ranks, and the worlds that have them.
#include "layout/common/rank_mask.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "layout/common/topology.h"

namespace ep {
namespace {

TEST(RankMask, HasABitForEachRank) {
  RankMask mask;
  EXPECT_FALSE(mask.any());
  for (int rank : {0, 31, 32, 63, 64, 71, 1151, kMaxRanks - 1}) {
    EXPECT_FALSE(mask.has(rank)) << rank;
    mask.add(rank);
    EXPECT_TRUE(mask.has(rank)) << rank;
  }
  // None is another's.
  int count = 0;
  for (int rank = 0; rank < kMaxRanks; rank++) count += mask.has(rank) ? 1 : 0;
  EXPECT_EQ(count, 8);
  EXPECT_TRUE(mask.any());
}

TEST(RankMask, ContainsOthers) {
  RankMask node, one;
  for (int rank = 40; rank < 80; rank++) node.add(rank);
  one.add(64);
  EXPECT_TRUE(node.has_all(40, 40));
  EXPECT_FALSE(node.has_all(40, 41));
  EXPECT_FALSE(node.has_all(39, 2));
  EXPECT_TRUE(node.has_all(one));
  EXPECT_FALSE(one.has_all(node));
  one.add(0);
  EXPECT_FALSE(node.has_all(one));
  EXPECT_TRUE((node | one).has_all(one));
  EXPECT_TRUE((node | one).has_all(node));
}

TEST(RankMask, AWorldHasNoMoreRanks) {
  EXPECT_EQ(RankMask::words_of(1), 1);
  EXPECT_EQ(RankMask::words_of(64), 2);
  EXPECT_EQ(RankMask::words_of(72), 3);
  EXPECT_EQ(RankMask::words_of(kMaxRanks), RankMask::kWords);
  EXPECT_EQ(Topology::make(1152, 72).num_domains(), 16);
  EXPECT_NO_THROW(Topology::make(kMaxRanks, 8));
  EXPECT_THROW(Topology::make(kMaxRanks + 8, 8), Error);
}

}  // namespace
}  // namespace ep
