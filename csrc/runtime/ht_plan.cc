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
  // With copies to make, eight workers keep the links as busy as they can be, and twenty warps copy.
  plan.workers = std::clamp(shared_bytes / stage_bytes, 1, has_copies ? 8 : 24);
  plan.warps = 28;
  plan.chunks = has_copies ? kHtChunks : 1;
  return plan;
}

HtPlan plan_ht_combine(bool has_staging, int num_sms) {
  HtPlan plan;
  plan.blocks = num_sms;
  plan.warps = 16;
  plan.workers = has_staging ? 6 : 16;
  plan.chunks = has_staging ? kHtChunks : 1;
  return plan;
}

int default_ht_sms(bool has_copies, int available) { return std::min(has_copies ? 32 : 12, available); }

}  // namespace ep
