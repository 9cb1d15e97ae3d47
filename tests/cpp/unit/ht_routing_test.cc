// The places that a sender computes from counts are those that the receiver would find by looking at every token.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "layout/ht/routing.h"

namespace ep {
namespace {

struct World {
  Shape shape;
  std::vector<std::vector<int32_t>> ids;  // [R][T, K]

  static World make(std::mt19937& random, int num_ranks) {
    const auto pick = [&](int choices) { return static_cast<int>(random() % choices); };
    World world;
    world.shape = Shape{num_ranks, num_ranks * (1 + pick(4)), 1 + pick(5), 1 + pick(9)};
    for (int rank = 0; rank < num_ranks; rank++) {
      std::vector<int32_t>& ids = world.ids.emplace_back(pick(world.shape.max_tokens + 1) * world.shape.topk);
      for (int32_t& id : ids) id = pick(4) == 0 ? -1 : pick(world.shape.num_experts);
    }
    return world;
  }
  int num_tokens(int rank) const { return static_cast<int>(ids[rank].size()) / shape.topk; }

  // What the rank would see if it were told every token's choices, as low latency is.
  Routing seen_at(int destination) const {
    Routing routing = Routing::empty(shape);
    for (int source = 0; source < shape.num_ranks; source++) {
      routing.tokens[source] = num_tokens(source);
      for (size_t i = 0; i < ids[source].size(); i++) {
        const int32_t id = ids[source][i];
        if (id < 0 || shape.owner(id) != destination) continue;
        routing.local_ids[static_cast<size_t>(source) * shape.max_tokens * shape.topk + i] = shape.local_expert(id);
      }
    }
    return routing;
  }
};

TEST(HtRouting, SendersFindTheReceiversPlaces) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 400; trial++) {
    const World world = World::make(random, 1 + trial % 5);
    const Shape& shape = world.shape;
    HtCounts counts = HtCounts::zero(shape);
    for (int r = 0; r < shape.num_ranks; r++) counts.count(shape, r, world.ids[r].data(), world.num_tokens(r));
    std::vector<OutputShape> outputs;
    for (int r = 0; r < shape.num_ranks; r++) {  // each with a layout and a capacity of its own
      const auto layout = static_cast<OutputLayout>(random() % 4);
      const int64_t capacity = layout == OutputLayout::kRankMajor ? shape.max_tokens : 1 + random() % 20;
      outputs.push_back(OutputShape::make(shape, layout, capacity, 1 + random() % 4));
    }
    for (int destination = 0; destination < shape.num_ranks; destination++) {
      const OutputShape& output = outputs[destination];
      const Placement seen = place_rows(shape, output, world.seen_at(destination));
      const Placement bins = place_bins(shape, output, counts, destination);
      EXPECT_EQ(bins.demand, seen.demand);
      EXPECT_EQ(bins.kept, seen.kept);
      EXPECT_EQ(bins.starts, seen.starts);
      EXPECT_EQ(bins.dropped, seen.dropped);
      int32_t slot = 0;
      for (int source = 0; source < shape.num_ranks; source++) {
        std::vector<int32_t> ids = world.ids[source], rows(ids.size(), 99), slots(ids.size(), 99);
        place_tokens(shape, outputs, counts, source, world.num_tokens(source), {ids.data(), rows.data(), slots.data()});
        EXPECT_EQ(first_slot(counts.rows.data(), shape.num_ranks, source, destination), slot);
        for (int token = 0; token < world.num_tokens(source); token++) {
          bool is_here = false;
          for (int k = 0; k < shape.topk; k++) {
            const size_t i = static_cast<size_t>(token) * shape.topk + k;
            if (ids[i] < 0) {
              EXPECT_EQ(rows[i], kNoRow);
              EXPECT_EQ(slots[i], kNoRow);
            }
            if (ids[i] < 0 || shape.owner(ids[i]) != destination) continue;
            is_here = true;
            const size_t entry = (static_cast<size_t>(source) * shape.max_tokens + token) * output.map_k() +
                                 (has_expert_rows(output.layout) ? k : 0);
            ASSERT_EQ(rows[i], seen.row_map[entry]) << "trial " << trial << ", layout " << name_of(output.layout);
            ASSERT_EQ(slots[i], slot);
          }
          slot += is_here;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ep
