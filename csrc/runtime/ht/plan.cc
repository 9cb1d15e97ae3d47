#include "runtime/ht/plan.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "layout/ht/offsets.h"

namespace ep {

constexpr int kMaxDispatchWarps = 28;

HtPlan plan_ht_route(const Arch& arch) {
  HtPlan plan;
  plan.blocks = std::min(arch.num_sms, kHtRouteBlocks);
  plan.warps = plan.workers = 32;
  plan.shared_bytes = arch.stage_bytes();
  return plan;
}

// Bytes that are to be on their way at a time: to other GPUs, and as many within this one as go to each of the others.
// With fewer the links run dry; with more each row takes longer, and the last ones leave links idle.
struct UnderWay {
  double away, within;

  // Of each of some blocks, to carry them.
  int warps(int num_ranks, int blocks, int warp_bytes) const {
    return static_cast<int>(std::lround((away + within / std::max(1, num_ranks - 1)) / blocks / warp_bytes));
  }
};

// Shared memory for rows. What Arch::stage_bytes() leaves has room for the tables of 64 ranks; each further one takes
// `rank_bytes`.
int room_for_rows(int num_ranks, int rank_bytes, const Arch& arch) {
  return arch.stage_bytes() - std::max(0, num_ranks - 64) * rank_bytes;
}

int most_ht_workers(int stage_bytes, HtWork work, int num_ranks, const Arch& arch) {
  const int room = room_for_rows(num_ranks, 8 * kHtMaxParts + 9 * 4, arch);  // HtSendGeometry
  // What shared memory does not take is an SM's cache, through which rows are copied.
  const int shared_bytes = work.copies ? std::min(room, 190 * 1024) : room;
  return std::clamp(shared_bytes / stage_bytes, 1, work.copies ? 14 : 24);
}

HtPlan plan_ht_dispatch(int stage_bytes, HtWork work, int num_ranks, const Arch& arch) {
  const int num_sms = arch.num_sms;
  HtPlan plan;
  plan.blocks = num_sms;
  plan.shared_bytes = arch.stage_bytes();
  if (work.copies) {
    plan.chunks = ht_chunks(num_ranks);
    // Where links fill up, a block's copies wait behind its stores. Between two ranks few blocks do not fill them.
    const bool fills_links = num_sms > 1 && (num_ranks > 2 || num_sms > 32);
    if (fills_links) plan.senders = std::max(1, num_sms * (work.converts ? 7 : 5) / 16);
  }
  // A row that is being quantised is not on its way.
  const UnderWay under_way = work.converts ? UnderWay{0.4e6, 3.4e6} : UnderWay{0.64e6, 1.41e6};
  const bool shares_blocks = work.copies && plan.senders == 0;
  const int least = shares_blocks && work.repeats ? 4 : 6;
  int most = most_ht_workers(stage_bytes, work, num_ranks, arch);
  if (shares_blocks) most = std::min(most, 12);
  const int blocks = plan.senders > 0 ? plan.senders : plan.blocks;
  plan.workers = std::clamp(under_way.warps(num_ranks, blocks, stage_bytes), std::min(least, most), most);
  plan.warps = work.copies ? kMaxDispatchWarps : plan.workers + 4;
  return plan;
}

HtPlan plan_ht_combine(HtWork work, int num_ranks, const Arch& arch) {
  const int num_sms = arch.num_sms;
  constexpr int kMaxWarps = 24, kWarpBytes = 8192;  // of rings
  HtPlan plan;
  plan.blocks = num_sms;
  plan.shared_bytes = room_for_rows(num_ranks, 8 + 4 * 4 + 3 * 4, arch);  // HtCombineGeometry
  const int most = std::clamp(plan.shared_bytes / kWarpBytes, 2, kMaxWarps);
  if (work.copies) {
    plan.warps = most;
    plan.workers = std::max(1, (work.adds ? (num_ranks > 2 ? 7 : 6) : 11) * most / kMaxWarps);
    plan.chunks = ht_chunks(num_ranks);
    plan.unit_pieces = num_ranks > 2 ? 4 : 0;
  } else {
    plan.warps = plan.workers =
        std::clamp(UnderWay{1.2e6, 1.2e6}.warps(num_ranks, num_sms, kWarpBytes), std::min(8, most), most);
    // Parts, so that warps end together; but each costs as much as some rows, and of few ranks tokens have few.
    plan.unit_pieces = num_ranks > 2 ? 2 : 0;
  }
  return plan;
}

int default_ht_sms(HtWork work, int num_ranks, const Arch& arch) {
  if (work.encodes) return arch.num_sms;  // conversion takes longer than the wire, on any number of SMs
  const bool are_few = num_ranks <= 2;
  const int copying = are_few && work.copies && (work.repeats || work.adds) ? 48 : 32;
  const int moving = are_few && work.stores ? 16 : 12;
  return std::min(work.converts || work.copies || work.is_narrow ? copying : moving, arch.num_sms);
}

std::string describe(const HtPlan& plan) {
  const std::string senders = plan.senders == 0 ? "all" : concat("[0, ", plan.senders, ")");
  return concat(plan.blocks, " blocks of ", plan.warps, " warps: in blocks ", senders, " ", plan.workers,
                " warps move rows; chunks: ", plan.chunks, ", pieces of a unit: ", plan.unit_pieces,
                "; shared memory for rows: ", plan.shared_bytes / 1024, " KB", plan.pdl ? ", programmatic launch" : "");
}

}  // namespace ep
