#include "runtime/ht_plan.h"

#include <algorithm>
#include <cmath>

#include "layout/ht_layout.h"

namespace ep {

constexpr int kMaxDispatchWarps = 28;

HtPlan plan_ht_route(int num_sms) {
  HtPlan plan;
  plan.blocks = std::min(num_sms, kHtRouteBlocks);
  plan.warps = plan.workers = 32;
  return plan;
}

// Workers of each of some blocks that send: of their rows a megabyte is on its way to other GPUs, and in proportion
// what stays on this one. With fewer the links run dry; with more each row takes longer, and the last ones leave links
// idle.
static int sending_workers(int stage_bytes, int stages, HtWork work, int num_ranks, int blocks) {
  const int ranks = std::max(2, num_ranks);
  const double under_way = 1e6 * ranks / (ranks - 1) * (work == HtWork::kConversion ? 1.5 : 1.0);
  return std::clamp(static_cast<int>(std::lround(under_way / blocks / stage_bytes)), std::min(5, stages), stages);
}

HtPlan plan_ht_dispatch(int stage_bytes, int shared_bytes, HtWork work, int num_ranks, int num_sms) {
  HtPlan plan;
  plan.blocks = num_sms;
  const int stages = std::clamp(shared_bytes / stage_bytes, 1, 24);
  if (work == HtWork::kCopies) {
    plan.warps = kMaxDispatchWarps;
    plan.chunks = kHtChunks;
    if (num_sms > 1) plan.senders = std::max(1, num_sms * 3 / 8);
    plan.workers = sending_workers(stage_bytes, std::min(stages, 14), work, num_ranks, std::max(1, plan.senders));
  } else {
    plan.workers = sending_workers(stage_bytes, stages, work, num_ranks, num_sms);
    plan.warps = plan.workers + 4;
  }
  return plan;
}

HtPlan plan_ht_combine(bool has_staging, int num_sms) {
  HtPlan plan;
  plan.blocks = num_sms;
  plan.warps = has_staging ? 24 : 20;
  plan.workers = has_staging ? 6 : plan.warps;
  plan.chunks = has_staging ? kHtChunks : 1;
  return plan;
}

int default_ht_sms(HtWork work, int available) { return std::min(work == HtWork::kNothing ? 12 : 32, available); }

}  // namespace ep
