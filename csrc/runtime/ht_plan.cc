#include "runtime/ht_plan.h"

#include <algorithm>

#include "layout/ht_layout.h"

namespace ep {

HtPlan plan_ht_route(int num_sms) {
  HtPlan plan;
  plan.blocks = num_sms;
  plan.warps = plan.workers = 32;
  return plan;
}

HtPlan plan_ht_dispatch(int stage_bytes, int shared_bytes, bool has_copies, int num_sms) {
  HtPlan plan;
  plan.blocks = num_sms;
  const int stages = std::max(1, shared_bytes / stage_bytes);
  if (has_copies) {  // a warp that copies has a stage, too
    plan.warps = std::clamp(stages, 2, 28);
    plan.workers = std::clamp(plan.warps * 3 / 7, 1, std::min(stages, 12));
  } else {
    plan.workers = std::min(stages, 24);
    plan.warps = plan.workers + 4;
  }
  plan.chunks = has_copies ? kHtChunks : 1;
  return plan;
}

HtPlan plan_ht_combine(bool has_staging, int num_sms) {
  HtPlan plan;
  plan.blocks = num_sms;
  plan.warps = has_staging ? 24 : 20;
  plan.workers = has_staging ? 8 : plan.warps;
  plan.chunks = has_staging ? kHtChunks : 1;
  return plan;
}

int default_ht_sms(HtWork work, int available) {
  return std::min(work == HtWork::kCopies ? 32 : work == HtWork::kConversion ? 24 : 12, available);
}

}  // namespace ep
