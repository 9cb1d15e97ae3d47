// What kernels are told beforehand: divisors, strides of work, shared memory.
#include "cuda/ll/common/geometry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arch.h"

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

using UnitKey = std::tuple<int, int, int>;  // home, token, piece

// A sending warp, as Sender of ll/combine/send.cuh goes through its units.
struct SendingWarp {
  const WorkSchedule* schedule;
  std::vector<uint32_t>* counters;
  int tokens, block, index;
  Unit unit;

  static SendingWarp of(const WorkSchedule& schedule, std::vector<uint32_t>& counters, int tokens, int block,
                        int warp) {
    return {&schedule, &counters, tokens, block, warp, schedule.static_unit(block, warp)};
  }
  bool exists() const { return unit.token < tokens; }
  UnitKey key() const { return {unit.home, unit.token, unit.piece}; }
  void advance() {
    index += schedule->warps;
    if (schedule->is_static(index)) {
      unit = schedule->static_unit(block, index);
    } else if (schedule->has_tickets(tokens)) {
      const int group = schedule->group_of(block);
      uint32_t& counter = (*counters)[group];
      const auto ticket = static_cast<int>(counter);
      counter = ticket >= schedule->last_ticket(group, tokens) ? 0 : counter + 1;
      unit = schedule->dynamic_unit(group, ticket);
      EXPECT_EQ((unit.token * schedule->pieces + unit.piece) % schedule->groups, group);
    } else {
      unit.token = tokens;
    }
  }
};

std::multiset<UnitKey> all_units(int homes, int tokens, int pieces) {
  std::multiset<UnitKey> units;
  for (int home = 0; home < homes; home++) {
    for (int token = 0; token < tokens; token++) {
      for (int piece = 0; piece < pieces; piece++) units.emplace(home, token, piece);
    }
  }
  return units;
}

TEST(WorkSchedule, DealsEveryUnitOnceAndLeavesTheCountersAtZero) {
  std::mt19937 random(1);
  for (auto [blocks, warps, pieces, homes] :
       {std::tuple{132, 9, 28, 3}, {6, 9, 28, 3}, {1, 9, 7, 2}, {7, 10, 3, 1}, {12, 9, 5, 63}, {4, 1, 1, 7}}) {
    for (int groups : {1, 4, 12, 64, blocks}) {
      const WorkSchedule schedule = WorkSchedule::of(blocks, warps, pieces, homes, groups);
      std::vector<uint32_t> counters(schedule.groups);
      for (int tokens : {9, 0, 1, 40, 3, 128}) {  // one call after the other
        std::vector<SendingWarp> senders;
        for (int block = 0; block < blocks; block++) {
          for (int warp = 0; warp < warps; warp++) {
            const auto sender = SendingWarp::of(schedule, counters, tokens, block, warp);
            if (sender.exists()) senders.push_back(sender);
          }
        }
        std::multiset<UnitKey> sent;
        while (!senders.empty()) {
          auto& sender = senders[random() % senders.size()];
          sent.insert(sender.key());
          sender.advance();
          if (!sender.exists()) {
            std::swap(sender, senders.back());
            senders.pop_back();
          }
        }
        ASSERT_EQ(sent, all_units(homes, tokens, pieces))
            << blocks << " blocks of " << warps << " warps, " << homes << " homes, " << schedule.groups << " groups, "
            << tokens << " tokens";
        for (uint32_t counter : counters) ASSERT_EQ(counter, 0u);
      }
    }
  }
}

TEST(WorkSchedule, GroupsDivideTheBlocksAndHaveACounter) {
  for (int blocks = 1; blocks <= 160; blocks++) {
    for (int wanted : {-1, 0, 1, 3, 4, 12, 64, 65, 132, 1000}) {
      const WorkSchedule schedule = WorkSchedule::of(blocks, 9, 28, 3, wanted);
      EXPECT_GE(schedule.groups, 1);
      EXPECT_LE(schedule.groups, kMaxTicketGroups);
      EXPECT_EQ(blocks % schedule.groups, 0) << blocks << " blocks, " << wanted << " groups wanted";
    }
  }
  EXPECT_EQ(WorkSchedule::of(60, 16, 28, 3, 4).groups, 4);
}

// A call on several ranks, each of which holds only so many blocks at a time, in the order of their numbers.
struct CrowdedCall {
  static constexpr int kWarps = 2, kPieces = 5, kTokens = 9;
  std::vector<LlPlan> plans;  // of the ranks
  int resident;
  int rank_with_halves = -1;  // counts halves of pieces as pieces

  struct Rank {
    WorkSchedule schedule;
    std::vector<uint32_t> counters;
    std::vector<std::vector<SendingWarp>> senders;  // by block
    std::vector<std::vector<int>> receivers;        // by block: the number of each warp's piece
    std::vector<bool> is_done;
    std::set<std::tuple<int, int, int>> arrived;  // source, token, half of a piece
  };

  int pieces(int r) const { return r == rank_with_halves ? 2 * kPieces : kPieces; }
  std::vector<int> halves(int r, int piece) const {
    if (r == rank_with_halves) return {piece};
    return {2 * piece, 2 * piece + 1};
  }

  // False: nobody goes on.
  bool completes(std::mt19937& random) const {
    const int num_ranks = static_cast<int>(plans.size());
    std::vector<Rank> ranks(num_ranks);
    for (int r = 0; r < num_ranks; r++) {
      Rank& rank = ranks[r];
      const LlPlan& plan = plans[r];
      rank.schedule = WorkSchedule::of(plan.sender_blocks, kWarps, pieces(r), num_ranks - 1, plan.groups);
      rank.counters.resize(rank.schedule.groups);
      rank.senders.resize(plan.blocks);
      rank.receivers.resize(plan.blocks);
      rank.is_done.resize(plan.blocks);
      for (int b = 0; b < plan.blocks; b++) {
        for (int w = 0; w < kWarps; w++) {
          if (b < plan.sender_blocks) {
            rank.senders[b].push_back(SendingWarp::of(rank.schedule, rank.counters, kTokens, b, w));
          }
          if (b >= plan.receiver_block0) {
            rank.receivers[b].push_back(w * plan.receiver_blocks() + b - plan.receiver_block0);
          }
        }
      }
    }
    bool has_moved = true;
    while (has_moved) {
      has_moved = false;
      for (int r = 0; r < num_ranks; r++) {
        int held = 0;
        for (int b = 0; b < plans[r].blocks && held < resident; b++) {
          if (ranks[r].is_done[b]) continue;
          held++;
          has_moved = step(ranks, r, b, random) || has_moved;
        }
      }
    }
    return std::all_of(ranks.begin(), ranks.end(), [](const Rank& rank) {
      return std::all_of(rank.is_done.begin(), rank.is_done.end(), [](bool is_done) { return is_done; });
    });
  }

  bool step(std::vector<Rank>& ranks, int r, int b, std::mt19937& random) const {
    const int num_ranks = static_cast<int>(ranks.size());
    bool has_moved = false, is_done = true;
    for (SendingWarp& sender : ranks[r].senders[b]) {
      for (int i = random() % 3; i >= 0 && sender.exists(); i--, has_moved = true) {
        const auto [home, token, piece] = sender.key();
        for (int half : halves(r, piece)) ranks[(r + 1 + home) % num_ranks].arrived.emplace(r, token, half);
        sender.advance();
      }
      is_done = is_done && !sender.exists();
    }
    for (int& number : ranks[r].receivers[b]) {
      for (; number < kTokens * pieces(r); number += plans[r].receiver_blocks() * kWarps, has_moved = true) {
        const Unit unit = ranks[r].schedule.unit(0, number);
        bool is_here = true;
        for (int source = 0; source < num_ranks; source++) {
          for (int half : halves(r, unit.piece)) {
            is_here = is_here && (source == r || ranks[r].arrived.count({source, unit.token, half}) > 0);
          }
        }
        is_done = is_done && is_here;
        if (!is_here) break;
      }
    }
    if (is_done) ranks[r].is_done[b] = true;
    return has_moved || is_done;
  }
};

LlPlan crowded_plan(int blocks, int sender_blocks, int receiver_block0, int groups) {
  LlPlan plan;
  plan.blocks = blocks;
  plan.sender_blocks = sender_blocks;
  plan.receiver_block0 = receiver_block0;
  plan.groups = groups;
  return plan;
}

TEST(WorkSchedule, EveryCallCompletesHoweverFewBlocksAreResident) {
  std::mt19937 random(1);
  const auto together = [](int groups) { return crowded_plan(12, 12, 0, groups); };
  const auto apart = [](int groups) { return crowded_plan(12, 4, 4, groups); };
  const auto one = crowded_plan(1, 1, 0, 1);
  const std::vector<std::vector<LlPlan>> worlds = {
      {together(1), together(1), together(1)},
      {together(12), together(12), together(12)},
      {apart(4), apart(4), apart(4)},
      {together(1), together(4), together(6)},
      {apart(4), together(4), apart(1)},
      {together(2), apart(2), together(12)},
      {one, one, one},
  };
  for (size_t world = 0; world < worlds.size(); world++) {
    for (int resident : {1, 2, 5, 12}) {
      for (int repeat = 0; repeat < 10; repeat++) {
        const CrowdedCall call{worlds[world], resident};
        EXPECT_TRUE(call.completes(random)) << "world " << world << ", " << resident << " blocks resident";
      }
    }
  }
}

// The claims of docs/memory_model.md are needed: without them a call hangs.
TEST(WorkSchedule, CallsHangWithReceiversBelowSendersOrOtherNumbersOfBlocksOrPieces) {
  std::mt19937 random(1);
  const LlPlan below = crowded_plan(12, 12, 7, 1);  // receiving blocks 7.. are not the senders of what they wait for
  EXPECT_FALSE((CrowdedCall{{below, below, below}, 1}.completes(random)));
  const LlPlan few = crowded_plan(5, 5, 0, 5), many = crowded_plan(12, 12, 0, 12);
  EXPECT_FALSE((CrowdedCall{{few, many, many}, 1}.completes(random)));
  EXPECT_FALSE((CrowdedCall{{many, many, many}, 1, 0}.completes(random)));
  EXPECT_TRUE((CrowdedCall{{many, many, many}, 12, 0}.completes(random))) << "all blocks resident";
  const LlPlan apart = crowded_plan(12, 4, 4, 4);
  EXPECT_TRUE((CrowdedCall{{apart, many, many}, 1, 0}.completes(random))) << "its senders wait for nobody";
}

LlDispatchParams some_dispatch(OutputLayout layout) {
  LlDispatchParams p;
  p.shape = Shape::make(4, 256, 8, 128);
  p.output = OutputShape::make(p.shape, layout, 512, 1);
  p.offsets.ids = IdFormat::make(64, 8);
  p.row = {7168 * 2, 0, false};
  p.num_tokens = 100;
  return p;
}

TEST(RoutingBitmapShape, RegionsDoNotOverlap) {
  for (OutputLayout layout : {OutputLayout::kExpertMajor, OutputLayout::kPacked, OutputLayout::kFlat}) {
    const RoutingBitmapShape shape = RoutingBitmapShape::of(some_dispatch(layout));
    EXPECT_EQ(shape.slots, 512);
    EXPECT_EQ(shape.bins, layout == OutputLayout::kFlat ? 1 : 64);
    EXPECT_GE(shape.words * 32, shape.slots);
    EXPECT_EQ(shape.words % 2, 1);
    EXPECT_EQ(shape.bits_at, RoutingBitmapShape::kIdsAt + shape.slots * shape.id_words);
    EXPECT_GE(shape.tokens_at, shape.bits_at + shape.bins * shape.words);
    EXPECT_EQ(shape.starts_at, shape.tokens_at + 4);
    EXPECT_GE(shape.bytes, 4 * (shape.starts_at + shape.bins + 1));
  }
}

int largest_unit(std::initializer_list<int64_t> multiples) {
  for (int unit : {16, 4}) {
    if (std::all_of(multiples.begin(), multiples.end(), [&](int64_t each) { return each % unit == 0; })) return unit;
  }
  return 1;
}

// Against the addresses that strides say.
void check_source(const Scales& scales, const std::string& what) {
  const ScaleSource source = ScaleSource::of(scales);
  const int size = scales.element_bytes;
  ASSERT_EQ(source.row_bytes, scales.count * size) << what;
  for (int64_t row : {0, 1, 6}) {
    for (int byte = 0; byte < source.row_bytes; byte++) {
      const char* expected = static_cast<const char*>(scales.data) +
                             (row * scales.row_stride + byte / size * scales.group_stride) * size + byte % size;
      const char* vector = source.data + row * source.row_stride + byte / 16 * source.vector_stride;
      ASSERT_EQ(vector + ScaleSource::byte_at(byte % 16, source.element_stride, source.shift), expected) << what;
      if (source.unit == 1) continue;
      const int in_unit = byte % source.unit;
      ASSERT_EQ(vector + (source.unit == 16 ? 0 : source.word_at[byte % 16 / 4]) + in_unit, expected) << what;
      ASSERT_EQ(reinterpret_cast<intptr_t>(expected - in_unit) % source.unit, 0) << what;
    }
    ASSERT_EQ(source.row_bytes % source.unit, 0) << what;
  }
}

TEST(Scales, ComeFromWhereTheirStridesSay) {
  alignas(16) static char memory[32];
  for (int size : {1, 2, 4, 8, 16}) {
    for (int count : {1, 2, 3, 4, 16, 21, 56}) {
      for (int offset : {0, 1, 2, 4, 8}) {
        const int64_t wide = align_up(count, 16);
        for (const auto& [row_stride, group_stride] : std::vector<std::pair<int64_t, int64_t>>{{count, 1},
                                                                                               {count + 3, 1},
                                                                                               {wide, 1},
                                                                                               {1, 7},
                                                                                               {0, 1},
                                                                                               {1, 0},
                                                                                               {0, 0},
                                                                                               {1000000007, 1},
                                                                                               {2, 2000000}}) {
          const Scales scales{memory + offset, row_stride, group_stride, count, size};
          const std::string what = std::to_string(count) + " of " + std::to_string(size) + " at " +
                                   std::to_string(offset) + ", strides " + std::to_string(row_stride) + " and " +
                                   std::to_string(group_stride);
          check_source(scales, what);
          const bool has_packed_results = group_stride == 1 || count == 1;
          EXPECT_EQ(ScaleSource::of(scales).unit, has_packed_results
                                                      ? largest_unit({offset, row_stride * size, count * size})
                                                      : largest_unit({offset, size}))
              << what;
        }
      }
    }
  }
}

TEST(Scales, GoOutInTheLargestUnitThatFitsEveryRow) {
  alignas(16) static char memory[32];
  for (int size : {1, 2, 4, 8, 16}) {
    for (int count : {1, 2, 3, 4, 16, 21, 56}) {
      for (int offset : {0, 1, 4, 8}) {
        const ScaleTarget target = ScaleTarget::of({memory + offset, count, 1, count, size});
        EXPECT_EQ(target.data, memory + offset);
        EXPECT_EQ(target.row_bytes, count * size);
        EXPECT_EQ(target.unit, largest_unit({offset, count * size})) << count << " of " << size << " at " << offset;
      }
    }
  }
}

TEST(Scales, OfAByteAndOfACallerGoOutInRowsThatLieTogether) {
  LlDispatchParams p = some_dispatch(OutputLayout::kExpertMajor);
  const LlPlan plan = plan_dispatch({p.num_tokens, p.row.wire_bytes(), true}, sm_90());
  p.options.quant = Quant::kMxfp8;
  p.out_scales = {nullptr, 224, 1, 224, 1};
  EXPECT_NO_THROW(LlDispatchGeometry::of(p, plan));
  p.out_scales = {nullptr, 4, 2, 2, 1};
  EXPECT_THROW(LlDispatchGeometry::of(p, plan), Error);
  p.options.quant = Quant::kFp8;
  p.out_scales = {nullptr, 1, 512, 56, 4};
  EXPECT_NO_THROW(LlDispatchGeometry::of(p, plan));
  p.options.quant = Quant::kNone;
  p.row.is_keyed = true;
  EXPECT_THROW(LlDispatchGeometry::of(p, plan), Error);
}

TEST(Scales, OfFourBytesGoOutFourAtATimeWhereEveryRowIsAligned) {
  alignas(16) static char memory[32];
  const auto unit = [](int offset, int64_t row_stride, int64_t group_stride, int count, int64_t bin_stride) {
    return ScaleTarget::of({memory + offset, row_stride, group_stride, count, 4, bin_stride}).unit;
  };
  EXPECT_EQ(unit(0, 8, 1, 8, 0), 16);
  EXPECT_EQ(unit(0, 8, 1, 8, 800), 16);
  EXPECT_EQ(unit(4, 8, 1, 8, 0), 4) << "the first address";
  EXPECT_EQ(unit(8, 8, 1, 8, 0), 4);
  EXPECT_EQ(unit(0, 7, 1, 7, 0), 4) << "a row of seven";
  EXPECT_EQ(unit(0, 10, 1, 8, 0), 4) << "the gap between rows";
  EXPECT_EQ(unit(0, 8, 1, 8, 802), 4) << "the gap between experts";
  EXPECT_EQ(unit(0, 1, 40, 8, 320), 4) << "columns";
}

TEST(DispatchGeometry, CountsThePiecesToSendAndToReceive) {
  LlDispatchParams p = some_dispatch(OutputLayout::kExpertMajor);
  const LlPlan plan = plan_dispatch({p.num_tokens, p.row.wire_bytes(), false}, sm_90());
  const LlDispatchGeometry whole = LlDispatchGeometry::of(p, plan);
  const int pieces = ceil_div(28, plan.steps);
  EXPECT_EQ(whole.row.steps, 28);
  EXPECT_EQ(whole.send_units, 100 * pieces);
  EXPECT_EQ(whole.own_units, 100 * pieces);
  EXPECT_EQ(whole.receive_units, (100 + 3 * 128) * pieces);
  p.phase = Phase::kRecv;
  EXPECT_EQ(LlDispatchGeometry::of(p, plan).own_units, 128 * pieces) << "a receive does not know its tokens";
}

LlPlan shared_plan(int blocks) {
  LlPlan plan;
  plan.blocks = plan.sender_blocks = blocks;
  plan.warps = 7;
  plan.sender_warps = plan.receiver_warp0 = 2;
  plan.receiver_warps = 4;
  plan.steps = 4;
  return plan;
}

// Units that a block places, in the order of its turns.
std::vector<int> units_of(const LlDispatchGeometry& geometry, const LlPlan& plan, int block) {
  const bool is_shared = geometry.shared_blocks > 0;
  std::vector<int> units;
  for (int turn = 0;; turn++) {
    const int unit =
        is_shared ? geometry.shared_unit(block, turn) : block - plan.receiver_block0 + turn * plan.receiver_blocks();
    if (unit >= geometry.receive_units) return units;
    units.push_back(unit);
  }
}

TEST(DispatchGeometry, SharedBlocksPlaceEveryPieceOnceAndThoseOfOtherRanksWhereTheyAreSent) {
  for (const int ranks : {1, 2, 4, 9}) {
    for (const int blocks : {2, 3, 8, 40}) {
      for (const int tokens : {0, 1, 17, 100}) {
        LlDispatchParams p = some_dispatch(OutputLayout::kExpertMajor);
        p.shape = Shape::make(ranks, 36, 4, 100);
        p.output = OutputShape::make(p.shape, OutputLayout::kExpertMajor, 512, 1);
        p.num_tokens = tokens;
        const LlPlan plan = shared_plan(blocks);
        const LlDispatchGeometry geometry = LlDispatchGeometry::of(p, plan);
        std::vector<int> counts(geometry.receive_units);
        for (int block = 0; block < blocks; block++) {
          for (const int unit : units_of(geometry, plan, block)) {
            counts[unit]++;
            if (unit < geometry.own_units) continue;
            EXPECT_EQ((unit - geometry.own_units) / (ranks - 1) % blocks, block);
          }
        }
        EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; }))
            << ranks << " ranks, " << blocks << " blocks, " << tokens << " tokens";
      }
    }
  }
}

// Whether a dispatch ends on ranks that hold only so many blocks at a time, in the order of their numbers. A block
// sends when it begins, and ends when all has come that it places.
bool dispatch_completes(const std::vector<LlPlan>& plans, int resident, bool routing_by_all = false) {
  LlDispatchParams p = some_dispatch(OutputLayout::kExpertMajor);
  const int ranks = static_cast<int>(plans.size());
  p.shape = Shape::make(ranks, 4 * ranks, 4, 20);
  p.output = OutputShape::make(p.shape, OutputLayout::kExpertMajor, 512, 1);
  p.num_tokens = 20;
  std::vector<LlDispatchGeometry> geometries;
  for (const LlPlan& plan : plans) geometries.push_back(LlDispatchGeometry::of(p, plan));
  std::vector<std::vector<bool>> has_begun, is_done;
  for (const LlPlan& plan : plans) {
    has_begun.emplace_back(plan.blocks);
    is_done.emplace_back(plan.blocks);
  }
  const auto knows_routing = [&](int source) {
    const auto& begun = has_begun[source];
    const auto has = [](bool each) { return each; };
    // Tickets: whichever block is there sends all that is left.
    const bool draws = plans[source].is_shared() && !routing_by_all;
    if (draws) return std::any_of(begun.begin(), begun.end(), has);
    return std::all_of(begun.begin(), begun.begin() + plans[source].sender_blocks, has);
  };
  const auto can_end = [&](int rank, int block) {
    if (block < plans[rank].receiver_block0) return true;
    for (int source = 0; source < ranks; source++) {
      if (!knows_routing(source)) return false;
    }
    for (const int unit : units_of(geometries[rank], plans[rank], block)) {
      const int other = unit - geometries[rank].own_units;
      if (other < 0) continue;
      const int source = (rank + ranks - 1 - other % (ranks - 1)) % ranks;
      if (!has_begun[source][other / (ranks - 1) % plans[source].sender_blocks]) return false;
    }
    return true;
  };
  for (bool has_moved = true; has_moved;) {
    has_moved = false;
    for (int rank = 0; rank < ranks; rank++) {
      int held = 0;
      for (int block = 0; block < plans[rank].blocks && held < resident; block++) {
        if (is_done[rank][block]) continue;
        held++;
        const bool ends = can_end(rank, block);
        has_moved = has_moved || ends || !has_begun[rank][block];
        has_begun[rank][block] = true;
        is_done[rank][block] = ends;
      }
    }
  }
  return std::all_of(is_done.begin(), is_done.end(), [](const auto& each) {
    return std::all_of(each.begin(), each.end(), [](bool is) { return is; });
  });
}

TEST(DispatchGeometry, EveryDispatchCompletesHoweverFewBlocksAreResident) {
  LlPlan apart = shared_plan(12);
  apart.sender_blocks = apart.receiver_block0 = 4;
  const LlPlan shared = shared_plan(12);
  for (const int resident : {1, 2, 5, 12}) {
    EXPECT_TRUE(dispatch_completes({shared, shared, shared}, resident)) << resident;
    EXPECT_TRUE(dispatch_completes({apart, apart, apart}, resident)) << resident;
    EXPECT_TRUE(dispatch_completes({apart, shared, shared}, resident)) << resident;
  }
  // The claims of docs/memory_model.md are needed: without them a dispatch hangs.
  EXPECT_FALSE(dispatch_completes({shared, shared}, 1, true)) << "all blocks send routing";
  EXPECT_FALSE(dispatch_completes({shared, shared_plan(11)}, 1)) << "other numbers of blocks";
}

TEST(DispatchGeometry, TicketsOfRoutingServeEveryTokenAndWrapToZero) {
  for (const int tokens : {0, 1, 17, 100}) {
    for (const int receiver_warps : {4, 5}) {  // with the leader warp, which draws none
      LlDispatchParams p = some_dispatch(OutputLayout::kExpertMajor);
      p.num_tokens = tokens;
      LlPlan plan = shared_plan(3);
      plan.receiver_warps = receiver_warps;
      const LlDispatchGeometry geometry = LlDispatchGeometry::of(p, plan);
      uint32_t counter = 0;
      int served = 0;
      for (int drawer = 0; drawer < 3 * 4; drawer++) {
        for (bool has_token = true; has_token;) {
          has_token = counter < static_cast<uint32_t>(tokens);
          served += has_token;
          counter = counter >= geometry.last_routing_ticket ? 0 : counter + 1;
        }
      }
      EXPECT_EQ(served, tokens);
      EXPECT_EQ(counter, 0u);
    }
  }
}

TEST(DispatchGeometry, NumbersOfRowsHaveWarpsOfTheirOwnWhereThereAreSome) {
  LlDispatchParams p = some_dispatch(OutputLayout::kExpertMajor);
  p.shape = Shape::make(4, 256, 8, 1);
  p.num_tokens = 1;
  const LlPlan plan = plan_dispatch({1, p.row.wire_bytes(), false}, sm_90());
  const int pieces = ceil_div(28, plan.steps);
  const LlDispatchGeometry small = LlDispatchGeometry::of(p, plan);
  EXPECT_EQ(small.numbers_piece, pieces);
  EXPECT_EQ(small.send_units, pieces) << "numbers are not sent as a piece";
  EXPECT_EQ(small.receive_units, 4 * (pieces + 1));
  EXPECT_EQ(small.listeners, 1);
  LlPlan few = plan;
  few.blocks = few.receiver_block0 + 1;  // 16 receivers for 56 pieces
  EXPECT_EQ(LlDispatchGeometry::of(p, few).numbers_piece, 0);
  p.shape = Shape::make(4, 256, 8, 128);
  EXPECT_EQ(LlDispatchGeometry::of(p, plan).listeners, 0) << "all warps wait for the routing of 512 slots";
  p.shape = Shape::make(1, 256, 8, 1);
  p.num_tokens = 0;
  EXPECT_EQ(LlDispatchGeometry::of(p, plan).receive_units, 0) << "a rank alone, without tokens";
  p.phase = Phase::kRecv;
  EXPECT_EQ(LlDispatchGeometry::of(p, plan).receive_units, pieces + 1) << "its receive does not know that";
}

LlCombineParams combine_of(const LlDispatchParams& dispatch) {
  LlCombineParams p;
  p.shape = dispatch.shape;
  p.hidden = 7168;
  p.offsets.ids = dispatch.offsets.ids;
  p.output = dispatch.output;
  return p;
}

TEST(Geometry, CombineHasSendersOrReceiversByItsPhase) {
  LlCombineParams p = combine_of(some_dispatch(OutputLayout::kExpertMajor));
  const LlPlan plan = plan_combine({1, 7168, false}, sm_90());
  const int others = p.shape.num_ranks - 1;
  ASSERT_GT(others, 0);
  const LlCombineGeometry whole = LlCombineGeometry::of(p, plan, 8);
  EXPECT_EQ(std::tuple(whole.homes, whole.home_step), std::tuple(others, 1)) << "not to itself";
  EXPECT_EQ(std::tuple(whole.sender_warps, whole.receiver_warps), std::tuple(plan.sender_warps, plan.receiver_warps));
  EXPECT_EQ(whole.map_k, p.shape.topk);
  p.phase = Phase::kSend;
  const LlCombineGeometry sending = LlCombineGeometry::of(p, plan, 8);
  EXPECT_EQ(std::tuple(sending.homes, sending.home_step), std::tuple(others + 1, 0)) << "to itself first";
  EXPECT_EQ(std::tuple(sending.sender_warps, sending.receiver_warps), std::tuple(plan.sender_warps, 0));
  p.phase = Phase::kRecv;
  const LlCombineGeometry receiving = LlCombineGeometry::of(p, plan, 8);
  EXPECT_EQ(std::tuple(receiving.sender_warps, receiving.receiver_warps), std::tuple(0, plan.receiver_warps));
  p = combine_of(some_dispatch(OutputLayout::kFlat));
  EXPECT_EQ(LlCombineGeometry::of(p, plan, 8).map_k, 1) << "one row a token";
  p.shape = Shape::make(1, 256, 8, 1);
  EXPECT_EQ(LlCombineGeometry::of(p, plan, 8).sender_warps, 0) << "a rank alone sends nothing";
  LlCombineGeometry inside = whole;
  inside.send_inside(plan, 3);
  EXPECT_EQ(inside.homes, 2);
  EXPECT_EQ(inside.schedule.homes, 2);
  EXPECT_EQ(inside.schedule.pieces, whole.schedule.pieces);
  EXPECT_EQ(inside.sender_warps, whole.sender_warps);
  inside.send_inside(plan, 1);
  EXPECT_EQ(inside.sender_warps, 0) << "a domain of one rank";
}

TEST(Geometry, RefusesAPlanWithoutAnOpener) {
  const LlDispatchParams dispatch = some_dispatch(OutputLayout::kExpertMajor);
  LlPlan plan = plan_dispatch({100, dispatch.row.wire_bytes(), false}, sm_90());
  plan.sender_warps = plan.warps;
  EXPECT_THROW(LlDispatchGeometry::of(dispatch, plan), Error);
  const LlCombineParams combine = combine_of(dispatch);
  for (int tokens : {1, 128}) {
    LlPlan sums = plan_combine({tokens, 7168, false}, sm_90());
    EXPECT_NO_THROW(LlCombineGeometry::of(combine, sums, 8));
    sums.receiver_warps++;
    EXPECT_THROW(LlCombineGeometry::of(combine, sums, 8), Error);
  }
  LlPlan sums = plan_combine({1, 7168, false}, sm_90());
  sums.sender_warps++;
  EXPECT_THROW(LlCombineGeometry::of(combine, sums, 8), Error) << "a warp has one role";
  sums = plan_combine({128, 7168, false}, sm_90());
  sums.receiver_block0 = sums.sender_blocks - 1;
  EXPECT_THROW(LlCombineGeometry::of(combine, sums, 8), Error) << "receivers must not lie below senders";
}

}  // namespace
}  // namespace ep
