// The rail of low latency between domains: its regions, its signals, its blocks.
#include "layout/ll/rail.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

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
  LlSizes sizes{8192, {1 << 16, 1 << 15}, false, 0};
  const LlWindow before = LlWindow::make(4, sizes);
  sizes.rail_domain_size = 4;
  const LlWindow one = LlWindow::make(4, sizes);
  EXPECT_EQ(one.bytes, before.bytes);
  EXPECT_EQ(one.rail[0].rows_in.count, 0u);
  sizes.rail_domain_size = 2;
  const LlWindow two = LlWindow::make(4, sizes);
  EXPECT_GT(two.bytes, before.bytes);
  EXPECT_EQ(two.heartbeats.offset, before.heartbeats.offset);
}

TEST(Rail, EveryRowOfAnOperationHasAPlaceOfItsOwn) {
  for (const auto& [domains, size] : std::vector<std::pair<int, int>>{{2, 1}, {2, 2}, {3, 2}, {8, 8}}) {
    const Topology topology{domains * size, size};
    const Shape shape = Shape::make(topology.num_ranks, topology.num_ranks * 2, 7, 13);
    const RowFormat row{640, 20, true};
    LlSizes sizes{LlOffsets::tagged_bytes(shape), {LlOffsets::row_bytes(shape, row.stride()), 1 << 16}, false, size};
    const LlWindow window = LlWindow::make(topology.num_ranks, sizes);
    const LlRail rail =
        LlRail::make(window.rail[0], Kind::kDispatch, topology, topology.num_ranks - 1, row.wire_bytes());
    Ranges ranges;
    const auto add = [&](Offset begin, uint64_t bytes) {
      EXPECT_TRUE(ranges.emplace(begin, begin + bytes).second);
      EXPECT_EQ(begin % 16, 0u);
    };
    for (int bank = 0; bank < kNumBanks; bank++) {
      add(rail.own_record(bank), RailRecord::bytes(shape.max_tokens * shape.topk));
      for (int domain = 0; domain < domains; domain++) {
        add(rail.record_from(bank, domain), RailRecord::bytes(shape.max_tokens * shape.topk));
        for (int token = 0; token < shape.max_tokens; token++) {
          add(rail.row_to(bank, domain, token), row.wire_bytes());
          add(rail.row_from(bank, domain, token), row.wire_bytes());
        }
      }
    }
    expect_apart(ranges, window.heartbeats.offset + 8ull * topology.num_ranks, window.rail[1].record_out.offset);
    EXPECT_EQ(topology.lsa_rank(rail.peer(0)), topology.lsa_rank(topology.num_ranks - 1));
  }
}

TEST(Rail, SignalsAreOneWordForEachKindParityDomainAndChannel) {
  const Topology topology{6, 2};
  RailRegions regions;
  std::set<std::pair<int, int>> words;
  for (Kind kind : {Kind::kDispatch, Kind::kCombine}) {
    const LlRail rail = LlRail::make(regions, kind, topology, 3, 16);
    for (int parity = 0; parity < 2; parity++) {
      for (int domain = 0; domain < 3; domain++) {
        for (int channel = 0; channel < kRailChannels; channel++) {
          const int context = rail.context(channel), signal = rail.signal(parity, domain, channel);
          EXPECT_TRUE(words.emplace(context, signal).second);
          EXPECT_LT(context, LlRail::num_contexts());
          EXPECT_LT(signal, LlRail::num_signals(3));
        }
      }
    }
  }
  uint64_t grown[2] = {0, 0};
  for (uint64_t epoch = 1; epoch < 20; epoch++) EXPECT_EQ(LlRail::expected(epoch), ++grown[epoch & 1]);
}

TEST(Rail, SharesHoldEveryTokenOnce) {
  for (int tokens = 0; tokens <= 300; tokens++) {
    const int share = rail_share(tokens);
    EXPECT_GE(share * kRowChannels, tokens);
    EXPECT_TRUE(tokens == 0 || (tokens - 1) / share < kRowChannels) << tokens;
  }
}

TEST(Rail, BlocksAreFewAndNeverNone) {
  for (int num_sms = 1; num_sms <= 160; num_sms++) {
    for (int others : {1, 3, 7, 63}) {
      for (int tokens : {1, 5, 128, 4096}) {
        const RailPlan plan = plan_rail({others, tokens, true, true, true}, num_sms);
        EXPECT_GE(plan.send_blocks, 1);
        EXPECT_GE(plan.forward_blocks, 1);
        EXPECT_GE(plan.sum_blocks, 1);
        EXPECT_LE(plan.blocks(), std::max(3 * num_sms / 4, 3));
        EXPECT_LE(plan.send_blocks, others * kRowChannels);
        EXPECT_EQ(plan_rail({others, tokens, false, false, false}, num_sms).sum_blocks, 0);
        const LlPlan rest = plan_combine({tokens, 7168, false, true}, std::max(num_sms - plan.blocks(), 2));
        EXPECT_LE(rest.sender_blocks, rest.receiver_block0);
        EXPECT_LT(rest.receiver_block0, rest.blocks);
      }
    }
  }
}

}  // namespace
}  // namespace ep
