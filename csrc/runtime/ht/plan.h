// How an operation of high throughput is laid over the GPU. A plan changes speed only.
#pragma once

#include <string>

#include "base/platform.h"
#include "layout/common/outputs.h"
#include "runtime/common/arch.h"

namespace ep {

struct HtPlan {
  int blocks = 1;
  int warps = 1;        // of a block
  int workers = 1;      // of them, those that move rows between ranks: warps [0, workers). A dispatch has helpers, too
  int chunks = 1;       // pieces in which the rows from one rank to another are announced
  int senders = 0;      // dispatch: blocks [0, senders) have workers alone, the others helpers; 0: all have both
  int unit_pieces = 0;  // combine: pieces of a row that a warp takes of a token at a time; 0: all
  bool pdl = false;     // programmatic dependent launch
  int shared_bytes = Arch{}.stage_bytes();  // of a block: for stages, rings or counters

  EP_HD int threads() const { return warps * 32; }
  EP_HD int workers_of(int block) const { return senders == 0 || block < senders ? workers : 0; }
  EP_HD int helpers() const { return senders == 0 ? warps - workers : warps; }  // of a block that has any
};

// What an operation does beside moving rows between ranks: rows are quantised; rows are copied, or added up, on a rank.
struct HtWork {
  bool converts = false, copies = false;
  bool adds = false;       // combine: what it copies are sums
  bool encodes = false;    // combine: sums travel in blocks of fewer bytes, within one domain
  bool stores = false;     // dispatch: rows are stored at other ranks
  bool is_narrow = false;  // dispatch: rows of at most kNarrowRow bytes
  bool repeats = false;    // dispatch: it copies a row for each choice
};

constexpr int kNarrowRow = 8192;

// Blocks that route, at most: each has a share of the tokens, and tells the others what it has counted.
constexpr int kHtRouteBlocks = 32;
HtPlan plan_ht_route(const Arch& arch);
// `stage_bytes`: of a row in shared memory. Most workers: of a block of any plan.
int most_ht_workers(int stage_bytes, HtWork work, int num_ranks, const Arch& arch);
HtPlan plan_ht_dispatch(int stage_bytes, HtWork work, int num_ranks, const Arch& arch);
// `work.copies`: before others read the rows.
HtPlan plan_ht_combine(HtWork work, int num_ranks, const Arch& arch);

// Blocks of an operation whose caller names none: the fewest that fill the links. Between two ranks half of what a
// block can store or add up is its own rank's. Of narrow rows there are more to a byte, and each takes its time.
int default_ht_sms(HtWork work, int num_ranks, const Arch& arch);

std::string describe(const HtPlan& plan);

}  // namespace ep
