// How an operation of high throughput is laid over the GPU. A plan changes speed only.
#pragma once

#include "base/platform.h"
#include "layout/outputs.h"

namespace ep {

struct HtPlan {
  int routers = 0;       // dispatch: blocks that route, before all others
  int router_warps = 0;  // of each
  int blocks = 1;        // the others
  int warps = 1;         // of each
  int workers = 1;       // of them, those that move rows between ranks: warps [0, workers). A dispatch has helpers, too
  int chunks = 1;        // pieces in which the rows from one rank to another are announced
  int senders = 0;       // dispatch: blocks [0, senders) have workers alone, the others helpers; 0: all have both
  int unit_pieces = 0;   // combine: pieces of a row that a warp takes of a token at a time; 0: all
  bool pdl = false;      // programmatic dependent launch

  EP_HD int grid() const { return routers + blocks; }
  EP_HD int threads() const { return 32 * (routers > 0 && router_warps > warps ? router_warps : warps); }
  EP_HD int workers_of(int block) const { return senders == 0 || block < senders ? workers : 0; }
  EP_HD int helpers() const { return senders == 0 ? warps - workers : warps; }  // of a block that has any
};

// What an operation does beside moving rows between ranks: rows are quantised; rows are copied, or added up, on a rank.
struct HtWork {
  bool converts = false, copies = false;
};

// A dispatch's blocks have as many warps, or as few where that is enough: those have more registers.
constexpr int kHtManyWarps = 28, kHtFewWarps = 20;
// Blocks that route, at most: each has a share of the tokens, and tells the others what it has counted.
constexpr int kHtRouteBlocks = 32;
// `stage_bytes`: of a row in shared memory.
HtPlan plan_ht_dispatch(int stage_bytes, int shared_bytes, HtWork work, int num_ranks, int num_sms);
// Makes it a plan of a dispatch that also routes, on so many SMs.
void add_routers(HtPlan& plan, int num_sms);
// `has_staging`: rows are added up or copied before others read them.
HtPlan plan_ht_combine(bool has_staging, int num_ranks, int num_sms);

// Blocks of an operation whose caller names none: the fewest that fill the links.
int default_ht_sms(HtWork work, int available);

}  // namespace ep
