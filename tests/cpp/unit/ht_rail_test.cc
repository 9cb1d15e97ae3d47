// The rail of high throughput between domains: what lies where, and its signals.
#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "layout/ht/rail.h"
#include "layout/ll/rail.h"
#include "layout/window.h"
#include "runtime/group.h"

namespace ep {
namespace {

using Ranges = std::set<std::pair<uint64_t, uint64_t>>;  // [begin, end)

void add(Ranges& ranges, uint64_t begin, uint64_t bytes) {
  EXPECT_TRUE(ranges.emplace(begin, begin + bytes).second) << begin;
  EXPECT_EQ(begin % 16, 0u);
  EXPECT_EQ(bytes % 16, 0u);
}

void expect_apart(const Ranges& ranges, uint64_t begin, uint64_t end) {
  uint64_t last = begin;
  for (const auto& [first, past] : ranges) {
    EXPECT_GE(first, last);
    last = past;
  }
  EXPECT_LE(last, end);
}

struct World {
  Topology topology;
  Shape shape;
  HtRowFormat dispatch, combine;
  Window window;
};

World world_of(int domains, int size, int topk, int max_tokens) {
  const Topology topology = Topology::make(domains * size, size);
  World world{topology, Shape::make(domains * size, domains * size * 2, topk, max_tokens), {}, {}, {}};
  for (int bytes : {112, 7, 16}) world.dispatch.add(bytes);
  world.combine.add(128);
  world.combine.add(topk * 4);
  HtSizes sizes = ht_sizes_for(topology, world.shape, 144, 128, 4096);
  sizes.rail_domain_size = domains > 1 ? size : 0;
  world.window = Window::make(topology.num_ranks, sizes_for(world.shape, 144, 128), sizes);
  return world;
}

TEST(HtRail, EveryRowOfAnOperationHasAPlaceOfItsOwn) {
  for (const auto& [domains, size] : std::vector<std::pair<int, int>>{{2, 1}, {2, 2}, {3, 2}, {8, 8}}) {
    for (int max_tokens : {1, 5, 16, 17, 100}) {
      const World world = world_of(domains, size, 3, max_tokens);
      const HtRouteFormat route{3};
      const HtRail rail = HtRail::make(world.window.ht, Kind::kDispatch, world.topology, 1 % size, world.shape,
                                       world.dispatch, route.bytes_with_token(), LlRail::num_signals(world.topology));
      const HtWindow& regions = world.window.ht;
      for (int tokens : {0, 1, max_tokens / 2, max_tokens}) {
        const int share = ht_rail_share(tokens);
        EXPECT_GE(share * kHtRailChunks, tokens);
        Ranges in;
        for (int domain = 0; domain < domains; domain++) {
          for (int chunk = 0; chunk * share < tokens; chunk++) {
            add(in, rail.in_part(domain) + rail.chunk_at(share, chunk), sizeof(HtRailHeader));
          }
          for (int place = 0; place < tokens; place++) {
            add(in, rail.in_part(domain) + rail.entry_at(share, place), rail.entry_bytes);
          }
        }
        expect_apart(in, regions.rail_in.offset, regions.rail_in.offset + regions.rail_in.count);
      }
    }
  }
}

TEST(HtRail, WeightsLieBehindTheSums) {
  const World world = world_of(3, 2, 8, 20);
  const HtRail rail = HtRail::make(world.window.ht, Kind::kCombine, world.topology, 0, world.shape, world.combine, 0,
                                   LlRail::num_signals(world.topology));
  const HtWindow& regions = world.window.ht;
  Ranges out;
  for (int domain = 0; domain < 3; domain++) {
    add(out, rail.out_part(domain), rail.domain_bytes);
    for (int place = 0; place < 20; place++) add(out, rail.weights_to(domain, place), rail.weight_bytes());
  }
  expect_apart(out, regions.rail_out.offset, regions.rail_out.offset + regions.rail_out.count);
}

TEST(HtRail, RecordsOfBothKindsAndBanksLieApart) {
  const World world = world_of(3, 2, 4, 6);
  const HtWindow& regions = world.window.ht;
  Ranges records;
  for (Kind kind : {Kind::kDispatch, Kind::kCombine}) {
    const HtRowFormat& row = kind == Kind::kDispatch ? world.dispatch : world.combine;
    const HtRail rail =
        HtRail::make(regions, kind, world.topology, 3, world.shape, row, 0, LlRail::num_signals(world.topology));
    for (int bank = 0; bank < kNumBanks; bank++) {
      add(records, rail.own_record(bank), rail.record_bytes);
      for (int domain = 0; domain < 3; domain++) add(records, rail.record_from(bank, domain), rail.record_bytes);
    }
  }
  expect_apart(records, regions.records_out.offset, regions.rail_out.offset);
}

TEST(HtRail, SignalsAreNobodyElses) {
  const World world = world_of(4, 2, 4, 6);
  const HtRail rail = HtRail::make(world.window.ht, Kind::kDispatch, world.topology, 0, world.shape, world.dispatch, 0,
                                   LlRail::num_signals(world.topology));
  std::set<std::pair<int, int>> seen;
  for (int parity = 0; parity < kNumBanks; parity++) {
    for (int domain = 0; domain < 4; domain++) {
      for (int channel = 0; channel < kHtRailChannels; channel++) {
        const int signal = rail.signal(parity, domain, channel);
        EXPECT_TRUE(seen.emplace(rail.context(channel), signal).second);
        EXPECT_GE(signal, LlRail::num_signals(world.topology));
        EXPECT_LT(signal, LlRail::num_signals(world.topology) + HtRail::num_signals(4));
        EXPECT_LT(rail.context(channel), LlRail::num_contexts());
      }
    }
  }
}

TEST(HtRail, RefusesWhatDoesNotFit) {
  const World world = world_of(2, 1, 4, 6);
  const Shape more{world.shape.num_ranks, world.shape.num_experts, world.shape.topk, 60};
  EXPECT_THROW(HtRail::make(world.window.ht, Kind::kDispatch, world.topology, 0, more, world.dispatch, 80,
                            LlRail::num_signals(world.topology)),
               Error);
}

}  // namespace
}  // namespace ep
