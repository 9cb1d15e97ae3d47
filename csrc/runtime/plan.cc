#include "runtime/plan.h"

#include <algorithm>

namespace ep {
namespace {

// The blocks that only send: a quarter fills the links, the rest have the copying to do.
int sender_share(int blocks, int share_of_132) { return std::clamp((blocks * share_of_132 + 66) / 132, 1, blocks - 1); }

// The piece size that wastes least of the last piece, the larger of equals.
int fitting_steps(int row_steps, int preferred) {
  int best = preferred, best_waste = align_up(row_steps, preferred) - row_steps;
  for (int steps : {7, 4, 2}) {
    if (steps > preferred) continue;
    const int waste = align_up(row_steps, steps) - row_steps;
    if (waste < best_waste) {
      best = steps;
      best_waste = waste;
    }
  }
  return best;
}

}  // namespace

LlPlan plan_dispatch(const LlDispatchSizes& sizes, int num_sms) {
  LlPlan plan;
  const int row_steps = ceil_div(sizes.wire_bytes, kStepBytes);
  plan.blocks = num_sms;
  if (sizes.num_tokens <= 16 || num_sms < 4) {
    // Little to send: every block does both, and the pieces are small.
    plan.sender_blocks = plan.blocks;
    plan.sender_warps = plan.receiver_warp0 = plan.receiver_warps = 8;
    plan.warps = 17;
    plan.steps = 2;
    return plan;
  }
  plan.warps = plan.receiver_warps = 16;
  plan.steps = fitting_steps(row_steps, sizes.is_heavy ? 2 : sizes.num_tokens <= 48 ? 4 : 7);
  plan.sender_warps = sizes.is_heavy && sizes.num_tokens > 48 ? 8 : 4;
  const int share = sizes.is_heavy ? 20 : sizes.num_tokens <= 48 ? 16 : 32;
  plan.sender_blocks = plan.receiver_block0 = sender_share(plan.blocks, share);
  return plan;
}

LlPlan plan_combine(int, int num_sms) {
  LlPlan plan;
  plan.blocks = plan.sender_blocks = num_sms;
  plan.sender_warps = plan.receiver_warp0 = plan.receiver_warps = 8;
  plan.warps = 17;
  return plan;
}

}  // namespace ep
