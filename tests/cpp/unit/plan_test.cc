// Plans are pure: what holds for every size can be checked without a GPU.
#include "runtime/ll/plan.h"

#include <gtest/gtest.h>

#include <set>

#include "arch.h"
#include "runtime/ht/plan.h"

namespace ep {
namespace {

constexpr int kMaxWarps = 20;  // of the kernels' launch bounds

void check_roles(const LlPlan& plan, int num_sms) {
  EXPECT_EQ(plan.blocks, num_sms);
  EXPECT_GE(plan.senders(), 1);
  EXPECT_GE(plan.receivers(), 1);
  EXPECT_LE(plan.warps, kMaxWarps);
  EXPECT_LE(plan.sender_blocks, plan.blocks);
  EXPECT_LE(plan.receiver_warp0 + plan.receiver_warps, plan.warps);
  // The control warp, the last of block 0, neither sends rows nor receives.
  EXPECT_LT(plan.sender_warps, plan.warps);
  if (plan.receiver_block0 == 0) {
    EXPECT_LT(plan.receiver_warp0 + plan.receiver_warps, plan.warps);
    EXPECT_LE(plan.sender_warps, plan.receiver_warp0);
  }
}

TEST(Plan, DispatchRolesAreDisjointForEverySize) {
  for (int num_sms = 1; num_sms <= 160; num_sms++) {
    for (int tokens : {0, 1, 8, 16, 17, 32, 48, 49, 128, 512, 4096}) {
      for (int wire_bytes : {16, 512, 2880 * 2, 7392, 14336, 65536}) {
        for (bool is_heavy : {false, true}) {
          const LlPlan plan = plan_dispatch({tokens, wire_bytes, is_heavy}, sm_90(num_sms));
          check_roles(plan, num_sms);
          EXPECT_TRUE(plan.steps == 2 || (plan.steps == 4 && !is_heavy));
          // Blocks that wait come after those that send, so that the grid need not be resident at once; or all do both.
          if (num_sms > 1) {
            EXPECT_EQ(plan.receiver_block0, plan.is_shared() ? 0 : plan.sender_blocks);
          }
          EXPECT_FALSE(plan.is_shared() && (tokens <= 16 || !can_share_blocks(is_heavy, plan.steps)));
        }
      }
    }
  }
}

TEST(Plan, BlocksOfADispatchAreSharedOnFewSmsAndWithManyTokens) {
  const auto is_shared = [](int tokens, bool is_heavy, int num_sms) {
    return plan_dispatch({tokens, is_heavy ? 7392 : 14336, is_heavy}, sm_90(num_sms)).is_shared();
  };
  EXPECT_FALSE(is_shared(16, false, 8));
  EXPECT_TRUE(is_shared(17, false, 40));
  EXPECT_FALSE(is_shared(17, false, 48));
  EXPECT_FALSE(is_shared(64, false, 32));
  EXPECT_TRUE(is_shared(128, false, 32));
  EXPECT_FALSE(is_shared(128, false, 132));
  EXPECT_TRUE(is_shared(512, false, 96));
  EXPECT_TRUE(is_shared(128, true, 80));
  EXPECT_FALSE(is_shared(128, true, 132));
  EXPECT_TRUE(is_shared(256, true, 132));
}

// Else block i would wait for other blocks (docs/memory_model.md, forward progress).
TEST(Plan, DispatchesThatShareBlocksHavePiecesOfOneSize) {
  for (int num_sms = 2; num_sms <= 48; num_sms++) {
    for (int wire_bytes : {16, 512, 2880 * 2, 7392, 14336, 65536}) {
      for (bool is_heavy : {false, true}) {
        std::set<int> steps;
        for (int tokens = 0; tokens <= 600; tokens++) {
          const LlPlan plan = plan_dispatch({tokens, wire_bytes, is_heavy}, sm_90(num_sms));
          if (plan.is_shared()) steps.insert(plan.steps);
        }
        EXPECT_LE(steps.size(), 1u) << num_sms << " SMs, rows of " << wire_bytes << " bytes";
      }
    }
  }
}

TEST(Plan, CombineRolesAreDisjointForEverySize) {
  for (int num_sms = 1; num_sms <= 160; num_sms++) {
    for (int tokens : {0, 1, 48, 49, 128, 4096}) {
      for (bool is_staged : {false, true}) {
        const LlPlan plan = plan_combine({tokens, 7168, is_staged}, sm_90(num_sms));
        check_roles(plan, num_sms);
        EXPECT_LT(plan.receiver_warp0 + plan.receiver_warps, plan.warps) << "the opener does nothing else";
        if (tokens <= 48 || is_staged || num_sms == 1) {  // every block has both roles
          EXPECT_EQ(plan.sender_blocks, plan.blocks);
          EXPECT_EQ(plan.receiver_block0, 0);
        } else {
          EXPECT_EQ(plan.receiver_block0, plan.sender_blocks) << "senders below receivers";
        }
      }
    }
  }
  EXPECT_EQ(plan_combine({128, 7168, false}, sm_90()).sender_blocks, 60);
  EXPECT_EQ(plan_combine({84, 4096, false}, sm_90()).sender_blocks, 132)
      << "as many pieces as 48 tokens of hidden 7168";
  EXPECT_EQ(plan_combine({85, 4096, false}, sm_90()).sender_blocks, 60);
}

TEST(Plan, CombineStreamsOnFewSmsIfTheLargestCallHasPiecesEnough) {
  for (int num_sms = 1; num_sms <= 160; num_sms++) {
    for (int max_tokens : {0, 1, 16, 128}) {
      for (int tokens : {0, 1, 128}) {
        const LlCombineSizes sizes{.num_tokens = tokens, .hidden = 7168, .max_tokens = max_tokens};
        const LlPlan plan = plan_combine(sizes, sm_90(num_sms));
        check_roles(plan, num_sms);
        EXPECT_EQ(plan.streams, num_sms <= 48 && max_tokens * 28 > 32 * num_sms) << num_sms << " " << max_tokens;
        if (!plan.streams) continue;
        EXPECT_EQ(plan.sender_blocks, num_sms) << "block i sends what block i receives";
        EXPECT_EQ(plan.receiver_block0, 0);
        EXPECT_LT(plan.receiver_warp0 + plan.receiver_warps, plan.warps) << "the opener does nothing else";
      }
    }
  }
}

TEST(Plan, IsPrinted) {
  EXPECT_EQ(
      describe(plan_dispatch({128, 14336, false}, sm_90())),
      "132 blocks of 16 warps: blocks [0, 32) send with 4 warps, blocks [32, 132) receive with 16 warps from warp "
      "0; steps of a piece: 4, groups of senders: 1");
  EXPECT_EQ(describe(plan_ht_dispatch(14336, {.copies = true}, 4, sm_90(32))),
            "32 blocks of 28 warps: in blocks [0, 10) 8 warps move rows; chunks: 16, pieces of a unit: 0; "
            "shared memory for rows: 200 KB");
  RailPlan links = plan_rail({.others = 1, .row_channels = 8, .num_tokens = 128, .row_bytes = 14336}, sm_90());
  links.sum_blocks = 3;
  EXPECT_EQ(describe(links), "for links 1 blocks send, 1 forward, 3 add up; slices of a channel: 1");
}

// B200 has more SMs, and nothing else is different; an RTX GPU has less shared memory, too.
TEST(Plan, FollowsTheArchitecture) {
  EXPECT_EQ(
      describe(plan_dispatch({128, 14336, false}, sm_100())),
      "148 blocks of 16 warps: blocks [0, 36) send with 4 warps, blocks [36, 148) receive with 16 warps from warp "
      "0; steps of a piece: 4, groups of senders: 1");
  EXPECT_EQ(plan_dispatch({128, 14336, false}, sm_120()).blocks, 188);
  EXPECT_EQ(plan_combine({128, 7168, false}, sm_100()).sender_blocks, 67);
  EXPECT_EQ(plan_combine({128, 7168, false}, sm_120()).sender_blocks, 85);
  EXPECT_EQ(describe(plan_ht_dispatch(14336, {.copies = true}, 4, sm_100().with_sms(32))),
            describe(plan_ht_dispatch(14336, {.copies = true}, 4, sm_90(32))));
  EXPECT_EQ(describe(plan_ht_dispatch(14336, {.copies = true}, 4, sm_120().with_sms(32))),
            "32 blocks of 28 warps: in blocks [0, 10) 5 warps move rows; chunks: 16, pieces of a unit: 0; "
            "shared memory for rows: 72 KB");
  EXPECT_EQ(describe(plan_ht_combine({.copies = true}, 4, sm_120().with_sms(32))),
            "32 blocks of 9 warps: in blocks all 4 warps move rows; chunks: 16, pieces of a unit: 4; shared memory for "
            "rows: 72 KB");
  EXPECT_EQ(describe(plan_ht_route(sm_120())),
            "32 blocks of 32 warps: in blocks all 32 warps move rows; chunks: 1, pieces of a unit: 0; shared memory "
            "for rows: 72 KB");
}

// Of a GPU with less shared memory a block has fewer workers; it always has one.
TEST(Plan, StagesFitTheArchitecture) {
  for (int shared_bytes : {64 * 1024, 99 * 1024, 227 * 1024}) {
    const Arch arch{.compute = 120, .num_sms = 16, .shared_bytes = shared_bytes};
    for (int stage_bytes : {2048, 8192, 14336}) {
      const int workers = plan_ht_dispatch(stage_bytes, {}, 4, arch).workers;
      EXPECT_GE(workers, 1);
      EXPECT_LE(workers * stage_bytes, arch.stage_bytes());
    }
  }
}

}  // namespace
}  // namespace ep
