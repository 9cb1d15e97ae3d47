// What kernels are told beforehand: divisors, strides of work, shared memory.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

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

// Walks every warp's units as Units of ll_combine.cuh does.
std::multiset<std::tuple<int, int, int>> walk(int blocks, int warps, int pieces, int homes, int tokens) {
  const UnitStride stride = UnitStride::of(blocks, warps, pieces, homes);
  std::multiset<std::tuple<int, int, int>> units;
  for (int block = 0; block < blocks; block++) {
    for (int warp = 0; warp < warps; warp++) {
      const int round = stride.by_homes.divide(warp);
      int home = stride.by_homes.remainder(warp, round);
      const int number = round * blocks + block;
      int token = number / pieces, piece = number % pieces;
      while (token < tokens) {
        units.emplace(home, token, piece);
        EXPECT_EQ((token * pieces + piece) % blocks, block) << "a unit belongs to one block, whatever the home";
        home += stride.home_step;
        const bool carry = home >= stride.homes;
        if (carry) home -= stride.homes;
        piece += stride.piece_step[carry];
        token += stride.token_step[carry];
        if (piece >= pieces) {
          piece -= pieces;
          token++;
        }
      }
    }
  }
  return units;
}

TEST(UnitStride, DealsEveryUnitOnce) {
  for (auto [blocks, warps, pieces, homes, tokens] :
       {std::tuple{132, 9, 28, 3, 128}, {4, 9, 28, 3, 5}, {1, 9, 7, 2, 3}, {7, 10, 3, 1, 11}, {132, 9, 5, 63, 2}}) {
    const auto units = walk(blocks, warps, pieces, homes, tokens);
    std::multiset<std::tuple<int, int, int>> expected;
    for (int home = 0; home < homes; home++) {
      for (int token = 0; token < tokens; token++) {
        for (int piece = 0; piece < pieces; piece++) expected.emplace(home, token, piece);
      }
    }
    EXPECT_EQ(units, expected) << blocks << " blocks of " << warps << " warps";
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

TEST(DispatchGeometry, NumbersOfRowsHaveWarpsOfTheirOwnWhereThereAreSome) {
  LlDispatchParams p = some_dispatch(OutputLayout::kExpertMajor);
  p.shape = Shape::make(4, 256, 8, 1);
  p.num_tokens = 1;
  const LlPlan plan = plan_dispatch({1, p.row.wire_bytes(), false}, 132);
  const int pieces = ceil_div(28, plan.steps);
  const LlDispatchGeometry small = LlDispatchGeometry::of(p, plan);
  EXPECT_EQ(small.numbers_piece, EP_D_NUMBERS != 0 ? pieces : 0);
  EXPECT_EQ(small.send_units, pieces) << "numbers are not sent as a piece";
  EXPECT_EQ(small.receive_units, 4 * (pieces + (EP_D_NUMBERS != 0 ? 1 : 0)));
  EXPECT_EQ(small.listeners, EP_D_ROTATE != 0 ? 1 : 0);
  LlPlan few = plan;
  few.blocks = few.receiver_block0 + 1;  // 16 receivers for 56 pieces
  EXPECT_EQ(LlDispatchGeometry::of(p, few).numbers_piece, 0);
  p.shape = Shape::make(4, 256, 8, 128);
  EXPECT_EQ(LlDispatchGeometry::of(p, plan).listeners, 0) << "all warps wait for the routing of 512 slots";
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
