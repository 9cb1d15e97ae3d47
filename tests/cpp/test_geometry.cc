// What kernels are told beforehand: divisors, strides of work, shared memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/geometry.h"

namespace ep {
namespace {

TEST(Divisor, DividesAsTheMachineDoes) {
  for (int divisor : {1, 2, 3, 5, 7, 8, 14, 63, 64, 65, 255, 1000, 65534, 65536, 1 << 30, INT32_MAX}) {
    const Divisor by = Divisor::of(divisor);
    for (int64_t base : {int64_t{0}, int64_t{divisor}, int64_t{divisor} * 17, int64_t{1} << 30, int64_t{INT32_MAX}}) {
      for (int64_t dividend = base - 3; dividend <= base + 3; dividend++) {
        if (dividend < 0 || dividend > INT32_MAX) continue;
        const int n = static_cast<int>(dividend), quotient = by.divide(n);
        ASSERT_EQ(quotient, n / divisor) << n << " / " << divisor;
        ASSERT_EQ(by.remainder(n, quotient), n % divisor) << n << " % " << divisor;
      }
    }
  }
}

// One rank's senders and receivers of a call, as Sender and Receiver of ll_combine.cuh go through their units.
class SimulatedRank {
 public:
  using Key = std::tuple<int, int, int>;  // home, token, piece

  SimulatedRank(const UnitDeal& send, std::vector<uint32_t>& counters, int tokens)
      : send_(send), counters_(counters), tokens_(tokens) {}

  // A warp from its first unit to its last: it waits for nobody. Other warps may draw in between.
  class Sender {
   public:
    Sender(SimulatedRank& rank, int block, int warp) : rank_(&rank), block_(block), index_(warp) {
      unit_ = rank.send_.dealt_unit(block, warp);
    }
    bool exists() const { return unit_.token < rank_->tokens_; }
    void step() {
      const UnitDeal& deal = rank_->send_;
      rank_->sent.emplace(unit_.home, unit_.token, unit_.piece);
      index_ += deal.warps;
      if (index_ < deal.dealt) {
        unit_ = deal.dealt_unit(block_, index_);
      } else if (deal.has_tickets(rank_->tokens_)) {
        const int group = deal.group_of(block_);
        uint32_t& counter = rank_->counters_[group];
        const auto ticket = static_cast<int>(counter);
        counter = ticket >= deal.last_ticket(group, rank_->tokens_) ? 0 : counter + 1;
        unit_ = deal.ticket_unit(group, ticket);
        EXPECT_EQ((unit_.token * deal.pieces + unit_.piece) % deal.groups, group);
      } else {
        unit_.token = rank_->tokens_;
      }
    }

   private:
    SimulatedRank* rank_;
    int block_, index_;
    Unit unit_;
  };

  std::multiset<Key> sent;

 private:
  const UnitDeal& send_;
  std::vector<uint32_t>& counters_;
  int tokens_;
};

std::multiset<SimulatedRank::Key> all_units(int homes, int tokens, int pieces) {
  std::multiset<SimulatedRank::Key> units;
  for (int home = 0; home < homes; home++) {
    for (int token = 0; token < tokens; token++) {
      for (int piece = 0; piece < pieces; piece++) units.emplace(home, token, piece);
    }
  }
  return units;
}

TEST(UnitDeal, DealsEveryUnitOnceAndLeavesTheCountersAtZero) {
  std::mt19937 random(1);
  for (auto [blocks, warps, pieces, homes] :
       {std::tuple{132, 9, 28, 3}, {6, 9, 28, 3}, {1, 9, 7, 2}, {7, 10, 3, 1}, {12, 9, 5, 63}, {4, 1, 1, 7}}) {
    for (int wanted_groups : {0, 1, 4, 12, 64, blocks}) {  // 0: no tickets
      for (int rounds : {1, 2}) {
        UnitDeal deal = UnitDeal::of(blocks, warps, pieces, homes);
        if (wanted_groups > 0) deal = deal.with_tickets(rounds, wanted_groups);
        std::vector<uint32_t> counters(deal.groups);
        for (int tokens : {9, 0, 1, 40, 3, 128}) {  // one call after the other
          SimulatedRank rank(deal, counters, tokens);
          std::vector<SimulatedRank::Sender> senders;
          for (int block = 0; block < blocks; block++) {
            for (int warp = 0; warp < warps; warp++) {
              SimulatedRank::Sender sender(rank, block, warp);
              if (sender.exists()) senders.push_back(sender);
            }
          }
          while (!senders.empty()) {
            auto& sender = senders[random() % senders.size()];
            sender.step();
            if (!sender.exists()) {
              std::swap(sender, senders.back());
              senders.pop_back();
            }
          }
          ASSERT_EQ(rank.sent, all_units(homes, tokens, pieces))
              << blocks << " blocks of " << warps << " warps, " << homes << " homes, " << deal.groups << " groups, "
              << tokens << " tokens";
          for (uint32_t counter : counters) ASSERT_EQ(counter, 0u);
        }
      }
    }
  }
}

LlDispatchParams some_dispatch(OutputLayout layout) {
  LlDispatchParams p;
  p.shape = Shape::make(4, 256, 8, 128);
  p.output = OutputShape::make(p.shape, layout, 512, 1);
  p.layout.ids = IdFormat::make(64, 8);
  p.row = {7168 * 2, 0, false};
  p.num_tokens = 100;
  return p;
}

TEST(PlacesShape, RegionsDoNotOverlap) {
  for (OutputLayout layout : {OutputLayout::kExpertMajor, OutputLayout::kFlat}) {
    const PlacesShape shape = PlacesShape::of(some_dispatch(layout));
    EXPECT_EQ(shape.slots, 512);
    EXPECT_EQ(shape.bins, layout == OutputLayout::kFlat ? 1 : 64);
    EXPECT_GE(shape.words * 32, shape.slots);
    EXPECT_EQ(shape.words % 2, 1);
    EXPECT_EQ(shape.bits_at, shape.slots * shape.id_words);
    EXPECT_GE(shape.tokens_at, shape.bits_at + shape.bins * shape.words);
    EXPECT_EQ(shape.starts_at, shape.tokens_at + 4);
    EXPECT_GE(shape.bytes, 4 * (shape.starts_at + shape.bins + 1));
  }
}

TEST(DispatchGeometry, CountsThePiecesToSendAndToReceive) {
  LlDispatchParams p = some_dispatch(OutputLayout::kExpertMajor);
  const LlPlan plan = plan_dispatch({p.num_tokens, p.row.wire_bytes(), false}, 132);
  const LlDispatchGeometry whole = LlDispatchGeometry::of(p, plan);
  const int pieces = ceil_div(28, plan.steps);
  EXPECT_EQ(whole.row.steps, 28);
  EXPECT_EQ(whole.send_units, 100 * pieces);
  EXPECT_EQ(whole.own_units, 100 * pieces);
  EXPECT_EQ(whole.receive_units, (100 + 3 * 128) * pieces);
  p.half = Half::kReceive;
  EXPECT_EQ(LlDispatchGeometry::of(p, plan).own_units, 128 * pieces) << "a receiving half does not know its tokens";
}

TEST(Geometry, RefusesAPlanWithoutAnOpener) {
  const LlDispatchParams dispatch = some_dispatch(OutputLayout::kExpertMajor);
  LlPlan plan = plan_dispatch({100, dispatch.row.wire_bytes(), false}, 132);
  plan.sender_warps = plan.warps;
  EXPECT_THROW(LlDispatchGeometry::of(dispatch, plan), Error);
  LlCombineParams combine;
  combine.shape = dispatch.shape;
  combine.hidden = 7168;
  combine.layout.ids = dispatch.layout.ids;
  combine.output = dispatch.output;
  LlPlan sums = plan_combine(132);
  EXPECT_NO_THROW(LlCombineGeometry::of(combine, sums, 8));
  sums.receiver_warps++;
  EXPECT_THROW(LlCombineGeometry::of(combine, sums, 8), Error);
}

}  // namespace
}  // namespace ep
