// RoutingBitmap of rows: edge cases of output shapes, and place_rows against a recount row by row.
#include "layout/common/routing.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "layout/common/outputs.h"

namespace ep {
namespace {

constexpr OutputLayout kLayouts[] = {OutputLayout::kExpertMajor, OutputLayout::kPacked, OutputLayout::kRankMajor,
                                     OutputLayout::kFlat};

TEST(OutputShape, HasTheRowsOfItsLayout) {
  EXPECT_EQ((OutputShape{OutputLayout::kExpertMajor, 4, 3, 8, 2, 5, 1}.rows()), 15);
  EXPECT_EQ((OutputShape{OutputLayout::kPacked, 4, 3, 8, 2, 5, 1}.rows()), 5);
  EXPECT_EQ((OutputShape{OutputLayout::kRankMajor, 4, 3, 8, 2, 8, 1}.rows()), 32);
  EXPECT_EQ((OutputShape{OutputLayout::kFlat, 4, 3, 8, 2, 5, 1}.rows()), 5);
  EXPECT_EQ((OutputShape{OutputLayout::kExpertMajor, 4, 3, 8, 2, 0, 1}.rows()), 0);
  EXPECT_EQ((OutputShape{OutputLayout::kExpertMajor, 64, 4096, 8, 2, 1 << 20, 1}.rows()), 1ll << 32);
}

TEST(OutputShape, RowsPastTheCapacityAreDropped) {
  const OutputShape expert{OutputLayout::kExpertMajor, 2, 3, 4, 2, 5, 1};
  EXPECT_EQ(expert.row(2, 0, 4), 14);
  EXPECT_EQ(expert.row(2, 0, 5), kDroppedRow);
  EXPECT_EQ(expert.kept(0, 7), 5);
  const OutputShape packed{OutputLayout::kPacked, 2, 3, 4, 2, 10, 4};
  EXPECT_EQ(packed.row(1, 8, 1), 9);
  EXPECT_EQ(packed.row(1, 8, 2), kDroppedRow);
  EXPECT_EQ(packed.kept(8, 5), 2);
  EXPECT_EQ(packed.kept(12, 5), 0);  // a bin that starts past the end
  EXPECT_EQ(packed.span(0), 0);
  EXPECT_EQ(packed.span(5), 8);
  const OutputShape flat{OutputLayout::kFlat, 2, 3, 4, 2, 3, 4};
  EXPECT_EQ(flat.span(5), 5);  // alignment is packed's
  EXPECT_EQ(flat.row(1, 2, 0), 2);
  EXPECT_EQ(flat.row(1, 3, 0), kDroppedRow);
  const OutputShape ranks{OutputLayout::kRankMajor, 2, 3, 4, 2, 4, 1};
  EXPECT_EQ(ranks.row(1, 0, 3), 7);
  EXPECT_EQ(ranks.kept(0, 4), 4);
}

TEST(OutputShape, InfoPartsFollowOneAnother) {
  for (OutputLayout layout : kLayouts) {
    const OutputShape output{layout, 4, 6, 8, 3, 8, 1};
    const int bins = has_expert_rows(layout) ? 6 : 4;
    EXPECT_EQ(output.bins(), bins);
    EXPECT_EQ(output.demand_at(), bins);
    EXPECT_EQ(output.overflow_at(), 2 * bins);
    EXPECT_EQ(output.total_at(), 2 * bins + 1);
    EXPECT_EQ(output.info_size(), 2 * bins + 2 + (layout == OutputLayout::kPacked ? 7 : 0));
  }
}

TEST(HandleShape, PartsDoNotOverlapAndStayAligned) {
  for (int num_ranks : {1, 3, 4}) {
    for (int num_tokens : {0, 1, 5}) {
      for (int topk : {1, 3}) {
        for (int map_k : {1, topk}) {
          const HandleShape handle{num_ranks, num_tokens, 5, topk, map_k};
          EXPECT_GE(handle.ids_at(), num_ranks + 1);
          EXPECT_GE(handle.map_at(), handle.ids_at() + num_tokens * topk);
          EXPECT_GE(handle.weights_at(), handle.map_at() + num_ranks * 5 * map_k);
          EXPECT_GE(handle.size(), handle.weights_at() + num_ranks * 5 * map_k);
          for (int64_t at : {handle.ids_at(), handle.map_at(), handle.weights_at()}) EXPECT_EQ(at % 4, 0);
        }
      }
    }
  }
}

struct World {
  Shape shape;
  OutputShape output;
  Routing routing;
};

World random_world(std::mt19937& random) {
  const auto pick = [&](int choices) { return static_cast<int>(random() % choices); };
  World world;
  const int num_ranks = 1 + pick(5), local_experts = 1 + pick(5);
  world.shape = Shape::make(num_ranks, num_ranks * local_experts, 1 + pick(6), 1 + pick(7));
  world.output = {kLayouts[pick(4)], num_ranks, local_experts, world.shape.max_tokens,
                  world.shape.topk,  pick(40),  1 + pick(9)};
  world.routing = Routing::empty(world.shape);
  const int absent = pick(4);  // 0: everything is here
  for (int32_t& tokens : world.routing.tokens) tokens = pick(world.shape.max_tokens + 1);
  for (int32_t& id : world.routing.local_ids) id = pick(4) < absent ? -1 : pick(local_experts);
  return world;
}

// Walks the world once for each question, so that nothing is remembered between rows.
class Recount {
 public:
  explicit Recount(const World& world) : w_(world) {}

  int32_t id(int source, int token, int k) const {
    return token < w_.routing.tokens[source]
               ? w_.routing.local_ids[(source * w_.shape.max_tokens + token) * w_.shape.topk + k]
               : -1;
  }
  bool is_here(int source, int token) const {
    for (int k = 0; k < w_.shape.topk; k++) {
      if (id(source, token, k) >= 0) return true;
    }
    return false;
  }
  // Rows of a bin before (source, token, k).
  int64_t before(int bin, int source, int token, int k) const {
    int64_t count = 0;
    for (int s = 0; s < w_.shape.num_ranks; s++) {
      for (int t = 0; t < w_.shape.max_tokens; t++) {
        for (int j = 0; j < (has_expert_rows(w_.output.layout) ? w_.shape.topk : 1); j++) {
          if (std::tuple(s, t, j) >= std::tuple(source, token, k)) return count;
          count += has_expert_rows(w_.output.layout) ? id(s, t, j) == bin : s == bin && is_here(s, t);
        }
      }
    }
    return count;
  }
  int64_t demand(int bin) const { return before(bin, w_.shape.num_ranks, 0, 0); }
  int64_t start(int bin) const {
    int64_t start = 0;
    for (int b = 0; b < bin; b++) {
      start += demand(b);
      while (w_.output.layout == OutputLayout::kPacked && start % w_.output.alignment != 0) start++;
    }
    return start;
  }
  int32_t row(int source, int token, int k) const {
    const bool expert_rows = has_expert_rows(w_.output.layout);
    const int bin = expert_rows ? id(source, token, k) : source;
    if (expert_rows ? bin < 0 : !is_here(source, token)) return kNoRow;
    const int64_t index = before(bin, source, token, k), capacity = w_.output.capacity;
    switch (w_.output.layout) {
      case OutputLayout::kExpertMajor:
        return index < capacity ? static_cast<int32_t>(bin * capacity + index) : kDroppedRow;
      case OutputLayout::kRankMajor:
        return static_cast<int32_t>(bin * w_.shape.max_tokens + index);
      default:
        break;
    }
    const int64_t place = start(bin) + index;
    return place < capacity ? static_cast<int32_t>(place) : kDroppedRow;
  }

 private:
  const World& w_;
};

TEST(PlaceRows, AgreesWithARecount) {
  std::mt19937 random(20);
  std::map<OutputLayout, int> with_drops;
  for (int trial = 0; trial < 400; trial++) {
    const World world = random_world(random);
    const Placement placement = place_rows(world.shape, world.output, world.routing);
    const Recount recount(world);
    const int map_k = world.output.map_k();
    std::vector<int64_t> kept(world.output.bins(), 0);
    std::set<int32_t> taken;
    int64_t dropped = 0;
    for (int source = 0; source < world.shape.num_ranks; source++) {
      for (int token = 0; token < world.shape.max_tokens; token++) {
        for (int k = 0; k < map_k; k++) {
          const int32_t row = placement.row_map[(source * world.shape.max_tokens + token) * map_k + k];
          ASSERT_EQ(row, recount.row(source, token, k))
              << "trial " << trial << ", rank " << source << ", token " << token << ", k " << k;
          dropped += row == kDroppedRow;
          if (row < 0) continue;
          ASSERT_LT(row, world.output.rows());
          ASSERT_TRUE(taken.insert(row).second) << "two rows at " << row << " in trial " << trial;
          kept[map_k > 1 || has_expert_rows(world.output.layout) ? recount.id(source, token, k) : source]++;
        }
      }
    }
    EXPECT_EQ(placement.dropped, dropped);
    EXPECT_EQ(placement.kept, kept);
    for (int bin = 0; bin <= world.output.bins(); bin++) {
      EXPECT_EQ(placement.starts[bin], recount.start(bin));
      if (bin < world.output.bins()) {
        EXPECT_EQ(placement.demand[bin], recount.demand(bin));
      }
    }
    with_drops[world.output.layout] += dropped > 0;
  }
  for (OutputLayout layout : {OutputLayout::kExpertMajor, OutputLayout::kPacked, OutputLayout::kFlat}) {
    EXPECT_GT(with_drops[layout], 5) << "too few cases overflow in layout " << name_of(layout);
  }
}

}  // namespace
}  // namespace ep
