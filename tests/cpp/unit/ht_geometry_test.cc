// What high throughput's kernels are told beforehand: stages, passes, pieces, plans.
#include <gtest/gtest.h>

#include <bit>

#include "arch.h"
#include "cuda/ht/common/geometry.h"

namespace ep {
namespace {

// Parts of these sizes, the first given by the caller, as all others but those of `made`.
HtDispatchParams dispatch_of(const std::vector<int>& bytes, int num_tokens = 7) {
  alignas(16) static char memory[16];
  HtDispatchParams p;
  p.shape = Shape::make(4, 16, 3, 8);
  p.output = OutputShape::make(p.shape, OutputLayout::kFlat, 32, 1);
  p.num_tokens = num_tokens;
  for (int size : bytes) {
    HtPart& part = p.parts[p.num_parts++];
    part = HtPart::contiguous(memory, size);
    part.out_offset = 4096;
  }
  return p;
}

TEST(HtChunks, EveryIndexLiesInOne) {
  for (int chunks : {1, kHtChunks}) {
    for (int count : {1, 2, 15, 16, 17, 100, 4096, 65536}) {
      int before = 0;
      for (int chunk = 0; chunk < chunks; chunk++) {
        const int begin = chunk_begin(chunk, count, chunks), end = chunk_begin(chunk + 1, count, chunks);
        ASSERT_EQ(begin, before) << "chunk " << chunk << " of " << count;
        for (int index = begin; index < end; index++) ASSERT_EQ(chunk_of(index, count, chunks), chunk) << index;
        before = end;
      }
      ASSERT_EQ(before, count);
    }
    EXPECT_EQ(chunk_begin(chunks, 0, chunks), 0);
  }
}

constexpr int kSharedBytes = Arch{}.stage_bytes();

TEST(HtSendGeometry, PassesHoldAllPartsOnce) {
  for (const Arch& arch : {sm_90(12), sm_120().with_sms(12)}) {
    for (const std::vector<int>& bytes : std::vector<std::vector<int>>{
             {14336}, {14336, 224}, {16}, {65536, 65536, 65536, 65536}, {65536, 32768, 16, 65536}, {128, 92, 64}}) {
      const HtDispatchParams p = dispatch_of(bytes);
      const HtSendGeometry shapes = HtSendGeometry::shapes_of(p, arch.stage_bytes());
      const HtPlan plan = plan_ht_dispatch(shapes.stage_bytes, {}, 4, arch);
      const HtSendGeometry g = HtSendGeometry::of(p, plan, shapes);
      ASSERT_GE(g.passes, 1);
      EXPECT_EQ(g.units, p.num_tokens * g.passes);
      EXPECT_EQ(g.first_part[0], 0);
      EXPECT_EQ(g.first_part[g.passes], p.num_parts);
      EXPECT_EQ(g.tables_at, plan.workers * g.stage_bytes);
      EXPECT_LE(g.tables_at, plan.shared_bytes);
      EXPECT_LE(g.bytes, arch.dynamic_bytes());
      for (int pass = 0; pass < g.passes; pass++) {
        ASSERT_LT(g.first_part[pass], g.first_part[pass + 1]) << "pass " << pass << " moves nothing";
        int end = 0;
        for (int i = g.first_part[pass]; i < g.first_part[pass + 1]; i++) {
          EXPECT_EQ(g.stage_offset[i] % 16, 0);
          EXPECT_GE(g.stage_offset[i], end) << "part " << i << " lies over the one before";
          end = g.stage_offset[i] + p.parts[i].bytes;
        }
        EXPECT_LE(end, g.stage_bytes);
      }
    }
  }
}

TEST(HtSendGeometry, OnlyAlignedRowsGoByBulkCopies) {
  HtDispatchParams p = dispatch_of({64, 92});
  EXPECT_EQ(HtSendGeometry::in_width_of(p.parts[0]), 0);
  EXPECT_EQ(HtSendGeometry::in_width_of(p.parts[1]), 4);
  p.parts[0].in = static_cast<const char*>(p.parts[0].in) + 2;
  EXPECT_EQ(HtSendGeometry::in_width_of(p.parts[0]), 2);
  HtPart strided = p.parts[1];  // 23 scales of 4 bytes, 20 bytes apart
  strided.elements = 23;
  strided.element_bytes = 4;
  strided.element_stride = 20;
  EXPECT_EQ(HtSendGeometry::in_width_of(strided), 4);
}

TEST(HtSendGeometry, KnowsWhoHasCopiesToMake) {
  HtDispatchParams p = dispatch_of({64});
  EXPECT_FALSE(HtSendGeometry::shapes_of(p, kSharedBytes).has_copies(p.output.layout));
  p.output.layout = OutputLayout::kPacked;
  EXPECT_TRUE(HtSendGeometry::shapes_of(p, kSharedBytes).has_copies(p.output.layout));
  p.output.layout = OutputLayout::kFlat;
  p.parts[0].out_offset = kNoOffset;
  EXPECT_TRUE(HtSendGeometry::shapes_of(p, kSharedBytes).has_copies(p.output.layout));
}

TEST(HtRouteGeometry, SharesCoverAllTokensAndFitTheMemory) {
  for (const Arch& arch : {sm_90(1), sm_90(2), sm_90(12), sm_90(), sm_120()}) {
    for (int tokens : {0, 1, 33, 4096, 65536}) {
      for (int topk : {1, 7, 8, 32}) {
        for (int experts : {64, 256, 1024, 4096, 10048}) {
          if (arch.compute == 120 && experts > 1024) continue;  // refused
          HtRouteParams p{dispatch_of({64}, tokens)};
          p.shape = Shape::make(64, experts, topk, 65536);
          const HtPlan plan = plan_ht_route(arch);
          EXPECT_LE(plan.blocks, std::min(arch.num_sms, kHtRouteBlocks));
          const HtRouteGeometry g = HtRouteGeometry::of(p, plan);
          EXPECT_GE(g.chunk_tokens * plan.blocks, tokens);
          ASSERT_GE(g.place_warps, 1);
          EXPECT_LT(g.place_warps, plan.warps);
          EXPECT_GE(g.place_warps * g.warp_tokens, g.chunk_tokens);
          EXPECT_EQ(g.warp_tokens % g.step_tokens, 0);
          EXPECT_LE(g.step_tokens * topk, 32);
          EXPECT_LE(g.bytes, plan.shared_bytes);
          if (experts == 256) {
            EXPECT_EQ(g.place_warps, 31);
          }
        }
      }
    }
  }
}

TEST(HtRouteGeometry, RefusesWhatItCannotCount) {
  HtRouteParams p{dispatch_of({64})};
  p.shape = Shape::make(4, 4 * 16384, 8, 8);
  EXPECT_THROW(HtRouteGeometry::of(p, plan_ht_route(sm_90(12))), Error);
  p.shape = Shape::make(4, 64, 32, 8);
  p.num_tokens = INT32_MAX / 64;
  EXPECT_NO_THROW(HtRouteGeometry::of(p, plan_ht_route(sm_90(12))));
  p.num_tokens++;
  EXPECT_THROW(HtRouteGeometry::of(p, plan_ht_route(sm_90(12))), Error);
}

// 16 racks of 72, and as many ranks as a world has: tables of all of them, and rows of 7168 in bf16.
TEST(HtPlan, HasRoomForTheTablesOfManyRanks) {
  for (int ranks : {64, 72, 80, 128, 144, 256, 576, 1152, kMaxRanks}) {
    EXPECT_LE(ht_chunks(ranks), kHtChunks);
    EXPECT_GE(ht_chunks(ranks), ranks <= 64 ? kHtChunks : 1);
    for (HtWork work : {HtWork{}, HtWork{.copies = true}, HtWork{.copies = true, .repeats = true}}) {
      HtDispatchParams dispatch;
      dispatch.shape = Shape::make(ranks, 2 * ranks, 8, 64);
      dispatch.output.local_experts = 2;
      dispatch.offsets.topology = Topology::make(ranks, 1);
      constexpr int kStage = 14336;
      HtPlan plan = plan_ht_dispatch(kStage, work, ranks, sm_90());
      plan.workers = most_ht_workers(kStage, work, ranks, sm_90());
      EXPECT_GE(plan.workers, 1);
      HtSendGeometry shapes;
      shapes.stage_bytes = kStage;
      EXPECT_LE(HtSendGeometry::of(dispatch, plan, shapes).bytes, 220 * 1024) << ranks;
      HtCombineParams combine;
      combine.shape = dispatch.shape;
      combine.hidden = 7168;
      const HtPlan combining = plan_ht_combine(work, ranks, sm_90());
      EXPECT_GE(combining.warps, combining.workers);
      EXPECT_LE(HtCombineGeometry::of(combine, combining).bytes, 220 * 1024) << ranks;
    }
    HtRouteParams route;
    route.shape = Shape::make(ranks, 2 * ranks, 8, 64);
    route.num_tokens = 64;
    EXPECT_LE(HtRouteGeometry::of(route, plan_ht_route(sm_90())).bytes, 200 * 1024) << ranks;
  }
}

TEST(HtPlan, FitsTheKernelsLimits) {
  for (int stage : {128, 7424, 14336, 65536, 2 * 65536}) {
    for (HtWork work : {HtWork{}, HtWork{.converts = true}, HtWork{.copies = true}, HtWork{true, true}}) {
      for (int ranks : {1, 2, 4, 64}) {
        for (int num_sms : {1, 2, 3, 8, 12, 32, 132}) {
          const HtPlan plan = plan_ht_dispatch(stage, work, ranks, sm_90(num_sms));
          EXPECT_EQ(plan.blocks, num_sms);
          EXPECT_GE(plan.workers, 1);
          EXPECT_LE(plan.workers, plan.warps);
          EXPECT_LE(plan.workers, most_ht_workers(stage, work, ranks, sm_90()));
          EXPECT_LE(plan.workers * stage, std::max(stage, kSharedBytes));
          EXPECT_LE(plan.threads(), 896);
          EXPECT_EQ(plan.chunks, work.copies ? kHtChunks : 1);
          EXPECT_GT(plan.helpers(), work.copies ? 1 : 0) << "one waits for rows, others copy";
          EXPECT_EQ(plan.senders > 0, work.copies && num_sms > 1 && (ranks > 2 || num_sms > 32));
          EXPECT_LT(plan.senders, num_sms);
        }
      }
    }
  }
  // More rows under way where more of them stay on this GPU, on fewer blocks, or if they are smaller.
  const auto workers = [](int stage, int ranks, int num_sms) {
    return plan_ht_dispatch(stage, {}, ranks, sm_90(num_sms)).workers;
  };
  EXPECT_GT(workers(14336, 2, 12), workers(14336, 4, 12));
  EXPECT_GT(workers(14336, 4, 8), workers(14336, 4, 12));
  EXPECT_GT(workers(7168, 4, 12), workers(14336, 4, 12));
  // Where every block copies: the fewer rows to copy, the more to send.
  const auto copying = [](bool repeats, int ranks) {
    return plan_ht_dispatch(14336, {.copies = true, .repeats = repeats}, ranks, sm_90(32)).workers;
  };
  EXPECT_LT(copying(true, 2), copying(false, 2));
  EXPECT_EQ(copying(true, 4), copying(false, 4));
  // Blocks that copy keep some 60 KB of an SM's 256 as a cache.
  EXPECT_LE(plan_ht_dispatch(14336, {.copies = true}, 2, sm_90(32)).workers * 14336, 190 * 1024);
  for (HtWork work : {HtWork{}, HtWork{.copies = true}, HtWork{.copies = true, .adds = true}}) {
    const HtPlan plan = plan_ht_combine(work, 4, sm_90(12));
    EXPECT_LE(plan.warps, HtCombineGeometry::kMaxWarps);
    EXPECT_EQ(plan.helpers() > 0, work.copies);
    HtCombineParams p;
    p.shape = Shape::make(64, 256, 8, 8);
    p.hidden = 7168;
    const HtCombineGeometry g = HtCombineGeometry::of(p, plan);
    EXPECT_EQ(g.tables_at, plan.warps * HtCombineGeometry::kRingBytes);
    EXPECT_LE(g.bytes, 220 * 1024);
    EXPECT_EQ(g.row_lanes, 7168 / 8);
    EXPECT_EQ(g.pieces, 7);
  }
  // Whole tokens where few ranks have rows of them, parts where many do.
  for (int ranks : {1, 2, 3, 4, 64}) {
    HtCombineParams p;
    p.shape = Shape::make(ranks, 64 * ranks, 8, 8);
    p.hidden = 7168;
    p.num_tokens = 8;
    const HtCombineGeometry g = HtCombineGeometry::of(p, plan_ht_combine({}, ranks, sm_90(12)));
    EXPECT_EQ(g.units, p.num_tokens * (ranks > 2 ? 4 : 1)) << ranks;
    EXPECT_EQ(1 << g.rank_bits, std::bit_ceil(static_cast<unsigned>(ranks))) << ranks;
  }
  for (HtWork work : {HtWork{}, HtWork{.copies = true}, HtWork{.copies = true, .adds = true}}) {
    for (int ranks : {1, 2, 64}) {
      const HtPlan plan = plan_ht_combine(work, ranks, sm_120());
      EXPECT_GE(plan.workers, 1);
      EXPECT_EQ(plan.helpers() > 0, work.copies);
      EXPECT_LE(plan.warps * HtCombineGeometry::kRingBytes, plan.shared_bytes);
    }
  }
  for (int ranks : {2, 4}) {
    const bool are_few = ranks == 2;
    EXPECT_EQ(default_ht_sms({}, ranks, sm_90()), 12);
    EXPECT_EQ(default_ht_sms({.stores = true}, ranks, sm_90()), are_few ? 16 : 12);
    EXPECT_EQ(default_ht_sms({.converts = true, .stores = true}, ranks, sm_90()), 32);
    EXPECT_EQ(default_ht_sms({.stores = true, .is_narrow = true}, ranks, sm_90()), 32);
    EXPECT_EQ(default_ht_sms({.copies = true}, ranks, sm_90()), 32);
    EXPECT_EQ(default_ht_sms({.copies = true, .stores = true, .repeats = true}, ranks, sm_90()), are_few ? 48 : 32);
    EXPECT_EQ(default_ht_sms({.copies = true, .adds = true}, ranks, sm_90()), are_few ? 48 : 32);
    EXPECT_EQ(default_ht_sms({.copies = true}, ranks, sm_90(8)), 8);
    EXPECT_EQ(default_ht_sms({.copies = true, .encodes = true}, ranks, sm_90()), 132);
  }
}

}  // namespace
}  // namespace ep
