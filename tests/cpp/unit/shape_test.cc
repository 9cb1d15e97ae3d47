// Sizes, topologies and regions.
#include "layout/common/shape.h"

#include <gtest/gtest.h>

#include <climits>
#include <set>

#include "layout/common/region.h"
#include "layout/common/topology.h"
#include "unit/errors.h"

namespace ep {
namespace {

TEST(Shape, EveryExpertHasOneOwnerAndOnePlaceThere) {
  for (int num_ranks : {1, 2, 3, 5, 16}) {
    for (int local : {1, 2, 7, 256}) {
      const Shape shape = Shape::make(num_ranks, num_ranks * local, 1, 1);
      std::set<std::pair<int, int>> places;
      for (int expert = 0; expert < shape.num_experts; expert++) {
        EXPECT_TRUE(shape.valid(expert));
        EXPECT_EQ(shape.owner(expert) * local + shape.local_expert(expert), expert);
        EXPECT_LT(shape.owner(expert), num_ranks);
        places.insert({shape.owner(expert), shape.local_expert(expert)});
      }
      EXPECT_EQ(places.size(), static_cast<size_t>(shape.num_experts));
    }
  }
}

TEST(Shape, IdsOutOfRangeAreInvalid) {
  const Shape shape = Shape::make(2, 8, 1, 1);
  for (long long id : {-1LL, 8LL, -9LL, 1LL << 32, (1LL << 32) + 1, LLONG_MIN, LLONG_MAX}) {
    EXPECT_FALSE(shape.valid(id)) << id;
  }
}

TEST(Shape, RefusesWithTheValues) {
  EXPECT_EQ(error_of([] { Shape::make(0, 6, 1, 1); }), "0 ranks, must be at least 1");
  EXPECT_EQ(error_of([] { Shape::make(4, 6, 1, 1); }), "num_experts is 6, and 6 experts do not divide over 4 ranks");
  EXPECT_NE(error_of([] { Shape::make(4, 0, 1, 1); }), "");
  EXPECT_EQ(error_of([] { Shape::make(1, 65535, 1, 1); }),
            "num_experts is 65535: 65535 experts on a rank, at most 65534");
  EXPECT_EQ(error_of([] { Shape::make(1, 65534, 1, 1); }), "");
  EXPECT_EQ(error_of([] { Shape::make(1, 4, 0, 1); }), "top-k is 0, must be 1 to 32");
  EXPECT_EQ(error_of([] { Shape::make(1, 4, 33, 1); }), "top-k is 33, must be 1 to 32");
  EXPECT_EQ(error_of([] { Shape::make(1, 4, 32, 1); }), "");
  EXPECT_EQ(error_of([] { Shape::make(1, 4, 1, 0); }), "max_tokens is 0, must be at least 1");
}

TEST(Topology, CutsTheWorldIntoConsecutiveDomains) {
  const Topology topology = Topology::make(6, 2);
  EXPECT_EQ(topology.num_domains(), 3);
  for (int a = 0; a < 6; a++) {
    EXPECT_EQ(topology.domain_of(a), a / 2);
    EXPECT_EQ(topology.lsa_rank(a), a % 2);
    for (int b = 0; b < 6; b++) EXPECT_EQ(topology.is_lsa(a, b), a / 2 == b / 2);
  }
}

TEST(Topology, RefusesUnequalDomains) {
  EXPECT_EQ(error_of([] { Topology::make(4, 3); }), "4 ranks do not divide into domains of 3");
  EXPECT_NE(error_of([] { Topology::make(4, 0); }), "");
  EXPECT_NE(error_of([] { Topology::make(4, -2); }), "");
  EXPECT_NE(error_of([] { Topology::make(0, 1); }), "");
  EXPECT_EQ(error_of([] { Topology::make(1, 1); }), "");
}

TEST(Carver, RegionsAreAlignedAndFollowOneAnother) {
  Carver carver;
  const auto bytes = carver.take<char>(3);
  const auto words = carver.take<uint64_t>(5);
  const auto aligned = carver.take<uint32_t>(1, 4096);
  EXPECT_EQ(bytes.offset, 0u);
  EXPECT_EQ(words.offset, 128u);
  EXPECT_EQ(words.at(2), 144u);
  EXPECT_EQ(aligned.offset, 4096u);
  EXPECT_EQ(carver.used(), 4100u);
  const auto empty = carver.take<uint64_t>(0);
  EXPECT_EQ(empty.offset, carver.used());
}

TEST(Math, CeilDivAndAlignUpRoundUp) {
  EXPECT_EQ(ceil_div(0, 4), 0);
  EXPECT_EQ(ceil_div(1, 4), 1);
  EXPECT_EQ(ceil_div(8, 4), 2);
  EXPECT_EQ(align_up(9, 4), 12);
  EXPECT_EQ(align_up<uint64_t>(1ull << 40, 4096), 1ull << 40);
}

}  // namespace
}  // namespace ep
