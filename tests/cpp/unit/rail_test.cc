// Low latency between domains, the rail and the mesh: regions, links, signals, blocks.
#include "layout/ll/rail.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "arch.h"
#include "layout/ll/offsets.h"
#include "runtime/ll/plan.h"

namespace ep {
namespace {

using Ranges = std::set<std::pair<uint64_t, uint64_t>>;  // [begin, end)

void expect_apart(const Ranges& ranges, uint64_t begin, uint64_t end) {
  uint64_t last = begin;
  for (const auto& [first, past] : ranges) {
    EXPECT_GE(first, last);
    last = past;
  }
  EXPECT_LE(last, end);
}

TEST(Rail, AWindowOfOneDomainHasNothingOfIt) {
  LlSizes sizes{8192, {1 << 16, 1 << 15}, 0, false, 0, 0};
  const LlWindow before = LlWindow::make(4, sizes);
  sizes.rail_domain_size = sizes.link_size = 4;
  const LlWindow one = LlWindow::make(4, sizes);
  EXPECT_EQ(one.bytes, before.bytes);
  EXPECT_EQ(one.rail[0].rows_in.count, 0u);
  sizes.rail_domain_size = sizes.link_size = 2;
  const LlWindow two = LlWindow::make(4, sizes);
  EXPECT_GT(two.bytes, before.bytes);
  EXPECT_EQ(two.heartbeats.offset, before.heartbeats.offset);
  sizes.link_size = 1;
  EXPECT_GT(LlWindow::make(4, sizes).bytes, two.bytes);
}

struct Shaped {
  int domains, size, link_size;
};
const Shaped kShapes[] = {{2, 1, 1}, {2, 2, 2}, {3, 2, 2}, {8, 8, 8}, {2, 2, 1}, {3, 2, 1}, {2, 3, 1}};

TEST(Rail, EveryRowOfAnOperationHasAPlaceOfItsOwn) {
  for (const auto& [domains, size, link_size] : kShapes) {
    const Topology topology{domains * size, size};
    const Shape shape = Shape::make(topology.num_ranks, topology.num_ranks * 2, 7, 13);
    const RowFormat row{640, 20, true};
    LlSizes sizes{LlOffsets::tagged_bytes(shape),
                  {LlOffsets::row_bytes(shape, row.stride()), 1 << 16},
                  0,
                  false,
                  size,
                  link_size};
    const LlWindow window = LlWindow::make(topology.num_ranks, sizes);
    const LlRail rail =
        LlRail::make(window.rail[0], Kind::kDispatch, topology, topology.num_ranks - 1, row.wire_bytes());
    Ranges ranges;
    const auto add = [&](Offset begin, uint64_t bytes) {
      EXPECT_TRUE(ranges.emplace(begin, begin + bytes).second);
      EXPECT_EQ(begin % 16, 0u);
    };
    for (int bank = 0; bank < kNumBanks; bank++) {
      add(rail.own_record(bank, 0), RailRecord::bytes(shape.max_tokens * shape.topk));
      EXPECT_EQ(rail.own_record(bank, rail.num_links - 1), rail.own_record(bank, 0));
      for (int link = 0; link < rail.num_links; link++) {
        add(rail.record_from(bank, link), RailRecord::bytes(shape.max_tokens * shape.topk));
        for (int token = 0; token < shape.max_tokens; token++) {
          add(rail.row_to(bank, link, token), row.wire_bytes());
          add(rail.row_from(bank, link, token), row.wire_bytes());
        }
      }
    }
    expect_apart(ranges, window.heartbeats.offset + 8ull * topology.num_ranks, window.rail[1].record_out.offset);
    EXPECT_EQ(topology.lsa_rank(rail.peer(0)) % link_size, topology.lsa_rank(topology.num_ranks - 1) % link_size);
  }
}

TEST(Rail, LinksLeadToEveryOtherDomainOnce) {
  for (const auto& [domains, size, link_size] : kShapes) {
    const Topology topology{domains * size, size};
    RailRegions regions;
    regions.link_size = link_size;
    for (int rank = 0; rank < topology.num_ranks; rank++) {
      const LlRail rail = LlRail::make(regions, Kind::kDispatch, topology, rank, 16);
      EXPECT_EQ(rail.link_of(rank), rail.link);
      EXPECT_EQ(rail.row_channels, link_size == size ? kRowChannels : kMeshRowChannels);
      std::set<int> served;
      for (int i = 0; i < rail.others(); i++) {
        const int link = rail.other(i), peer = rail.peer(link);
        EXPECT_NE(topology.domain_of(peer), topology.domain_of(rank));
        EXPECT_EQ(rail.link_of(peer), link);
        // What the peer calls this rank's link leads back.
        EXPECT_EQ(LlRail::make(regions, Kind::kDispatch, topology, peer, 16).peer(rail.link), rank);
        for (int r = rail.first_of(link); r < rail.first_of(link) + link_size; r++) {
          EXPECT_TRUE(served.insert(r).second);
        }
      }
      EXPECT_EQ(static_cast<int>(served.size()), topology.num_ranks - size);
    }
  }
}

TEST(Rail, AutomaticallyItIsTheMeshForLittleToFewRanks) {
  const Topology two = Topology::make(16, 8), four = Topology::make(32, 8), ones = Topology::make(2, 1);
  constexpr uint64_t kRow = 14336;
  EXPECT_EQ(ll_link_size(LlNetwork::kAuto, false, two, 4 * kRow), 1);
  EXPECT_EQ(ll_link_size(LlNetwork::kAuto, false, two, 5 * kRow), 8);
  EXPECT_EQ(ll_link_size(LlNetwork::kAuto, false, two, 0), 8);  // a buffer of high throughput alone
  EXPECT_EQ(ll_link_size(LlNetwork::kAuto, false, four, kRow), 8);
  EXPECT_EQ(ll_link_size(LlNetwork::kRail, false, two, kRow), 8);
  EXPECT_EQ(ll_link_size(LlNetwork::kMesh, false, four, 128 * kRow), 1);
  for (LlNetwork each : {LlNetwork::kAuto, LlNetwork::kRail, LlNetwork::kMesh}) {
    EXPECT_EQ(ll_link_size(each, false, ones, kRow), 1);
  }
  EXPECT_EQ(ll_link_size(LlNetwork::kAuto, true, four, 128 * kRow), 1);  // masks
  EXPECT_THROW(ll_network_of("star"), Error);
}

TEST(Rail, WithMasksEachLinkHasARecordAndCountersOfItsOwn) {
  const Topology topology{6, 3};
  const Shape shape = Shape::make(6, 12, 4, 5);
  LlSizes sizes{LlOffsets::tagged_bytes(shape), {LlOffsets::row_bytes(shape, 64), 1 << 12}, 0, true, 3, 1};
  const LlWindow window = LlWindow::make(6, sizes);
  const LlRail rail = LlRail::make(window.rail[0], Kind::kDispatch, topology, 4, 64);
  Ranges records, counters;
  std::set<int> signals;
  for (int bank = 0; bank < kNumBanks; bank++) {
    for (int link = 0; link < 6; link++) {
      const Offset record = rail.own_record(bank, link);
      EXPECT_TRUE(records.emplace(record, record + RailRecord::bytes(20)).second);
      for (int channel = 0; channel < rail.channels(); channel++) {
        const Offset counter = rail.posted_at(bank, link, channel);
        EXPECT_TRUE(counters.emplace(counter, counter + 8).second);
        EXPECT_TRUE(signals.insert(rail.signal(bank, link, channel)).second);
      }
    }
  }
  expect_apart(records, window.rail[0].record_out.offset, window.rail[0].record_in.offset);
  expect_apart(counters, window.rail[0].posted.offset, window.rail[1].record_out.offset);
  for (int rank = 0; rank < 6; rank++) {
    EXPECT_TRUE(signals.insert(rail.mask_signal(rank)).second);
    EXPECT_TRUE(signals.insert(rail.heartbeat_signal(rank)).second);
    EXPECT_EQ(rail.is_far(rank), rank < 3);
  }
  EXPECT_LT(*signals.rbegin(), LlRail::num_signals(topology));
}

TEST(Rail, SignalsAreOneWordForEachKindParityLinkAndChannel) {
  const Topology topology{6, 2};
  for (int link_size : {1, 2}) {
    RailRegions regions;
    regions.link_size = link_size;
    std::set<std::pair<int, int>> words;
    for (Kind kind : {Kind::kDispatch, Kind::kCombine}) {
      const LlRail rail = LlRail::make(regions, kind, topology, 3, 16);
      for (int parity = 0; parity < 2; parity++) {
        for (int link = 0; link < rail.num_links; link++) {
          for (int channel = 0; channel < rail.channels(); channel++) {
            const int context = rail.context(channel), signal = rail.signal(parity, link, channel);
            EXPECT_TRUE(words.emplace(context, signal).second);
            EXPECT_LT(context, LlRail::num_contexts());
            EXPECT_LT(signal, LlRail::num_signals(topology));
          }
        }
      }
    }
  }
  uint64_t grown[2] = {0, 0};
  for (uint64_t epoch = 1; epoch < 20; epoch++) EXPECT_EQ(LlRail::expected(epoch), ++grown[epoch & 1]);
}

TEST(Rail, SharesHoldEveryTokenOnce) {
  for (int channels : {kRowChannels, kMeshRowChannels}) {
    LlRail rail;
    rail.row_channels = channels;
    rail.by_row_channels = Divisor::of(channels);
    for (int tokens = 0; tokens <= 300; tokens++) {
      const int share = rail.share(tokens);
      EXPECT_EQ(share, std::max(ceil_div(tokens, channels), 1)) << tokens;
      EXPECT_GE(share * channels, tokens);
      EXPECT_TRUE(tokens == 0 || (tokens - 1) / share < channels) << tokens;
    }
  }
}

TEST(Rail, BlocksAreFewAndNeverNone) {
  for (int num_sms = 1; num_sms <= 160; num_sms++) {
    for (int others : {1, 3, 7, 63}) {
      for (int tokens : {1, 5, 128, 4096}) {
        const RailPlan plan = plan_rail({others, kRowChannels, tokens, 14336, true, true, true, true}, sm_90(num_sms));
        EXPECT_GE(plan.send_blocks, 1);
        EXPECT_GE(plan.forward_blocks, 1);
        EXPECT_GE(plan.sum_blocks, 1);
        const int most = std::max(num_sms * 2 / 7, 1);
        EXPECT_LE(std::max({plan.send_blocks, plan.forward_blocks, plan.sum_blocks}), most);
        EXPECT_GE(plan.slices, 1);
        EXPECT_LE(plan.send_blocks, 1 + others * kRowChannels * plan.slices);
        EXPECT_LE(plan.forward_blocks, others * (1 + kRowChannels) * plan.slices);
        EXPECT_LE(plan.sum_blocks, others * kRowChannels * plan.slices);
        if (plan.slices > 1) {  // a block for each
          EXPECT_EQ(plan.send_blocks, 1 + others * std::min(tokens, kRowChannels) * plan.slices);
          EXPECT_EQ(plan.forward_blocks, others * (1 + std::min(tokens, kRowChannels)) * plan.slices);
          EXPECT_EQ(plan.sum_blocks, others * std::min(tokens, kRowChannels) * plan.slices);
        }
        const RailPlan scalars = plan_rail({others, kRowChannels, tokens, 32}, sm_90(num_sms));
        EXPECT_EQ(scalars.sum_blocks, 0);
        EXPECT_EQ(scalars.slices, 1);
        const LlPlan rest = plan_combine({tokens, 7168, false, true}, sm_90(std::max(num_sms - plan.blocks(), 2)));
        EXPECT_LE(rest.sender_blocks, rest.receiver_block0);
        EXPECT_LT(rest.receiver_block0, rest.blocks);
      }
    }
  }
}

TEST(Rail, BlocksShareAChannelWhereLinksAreFew) {
  const auto slices = [](int others, int row_channels, int tokens, int row_bytes, int num_sms = 132) {
    return plan_rail({others, row_channels, tokens, row_bytes, true, true, true, true}, sm_90(num_sms)).slices;
  };
  EXPECT_EQ(slices(1, kRowChannels, 128, 14336), 4);
  EXPECT_EQ(slices(1, kRowChannels, 128, 7392), 4);
  EXPECT_EQ(slices(2, kRowChannels, 128, 14336), 2);
  EXPECT_EQ(slices(3, kRowChannels, 128, 14336), 1);
  EXPECT_EQ(slices(2, kMeshRowChannels, 128, 14336), 6);
  EXPECT_EQ(slices(8, kMeshRowChannels, 128, 14336), 1);
  // Little to share.
  EXPECT_EQ(slices(1, kRowChannels, 1, 14336), 1);
  EXPECT_EQ(slices(1, kRowChannels, 32, 14336), 3);
  EXPECT_EQ(slices(1, kRowChannels, 128, 512), 1);
  // Few SMs.
  EXPECT_EQ(slices(1, kRowChannels, 128, 14336, 62), 1);
  EXPECT_EQ(slices(1, kRowChannels, 128, 14336, 63), 2);
  const RailPlan plan = plan_rail({1, kRowChannels, 128, 14336, true, true, true}, sm_90());
  EXPECT_EQ(plan.send_blocks, 33);
  EXPECT_EQ(plan.forward_blocks, 36);
  EXPECT_EQ(plan.sum_blocks, 0);
  const RailPlan placed = plan_rail({1, kRowChannels, 128, 14336, true, true, false}, sm_90());
  EXPECT_EQ(placed.send_blocks, 33);
  EXPECT_EQ(placed.forward_blocks, 4) << "the record alone is forwarded";
  RailSizes added{1, kRowChannels, 128, 14336};
  added.adds_up = added.ends_early = true;
  const RailPlan of_rows = plan_rail(added, sm_90());
  EXPECT_EQ(of_rows.slices, 12) << "where rows are added up, nobody else has to do with them";
  EXPECT_EQ(of_rows.sum_blocks, 96);
}

}  // namespace
}  // namespace ep
