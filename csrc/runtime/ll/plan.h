// How an operation is laid over the GPU: a pure function of sizes, so that it can be printed and tested anywhere. A
// plan changes speed only: rows, places and sums are the same for every plan.
#pragma once

#include <cstdint>
#include <string>

#include "base/math.h"
#include "base/platform.h"
#include "runtime/common/arch.h"

namespace ep {

constexpr int kLaneBytes = 16;
constexpr int kStepBytes = 32 * kLaneBytes;  // what a warp moves with one instruction

// Whether a dispatch kernel serves blocks that all send and receive. Those that move few bytes a piece and convert none
// do not: they are for few tokens, where instructions count.
EP_HD constexpr bool can_share_blocks(bool is_heavy, int steps) { return is_heavy || steps > 2; }

// In dispatch, warps are numbered across blocks: warp w of block b is worker w * blocks + b of its role. The last warp
// of block 0 exchanges op headers with the other ranks before it does anything else. Blocks of which all send and
// receive are shared: block i receives what block i of the other ranks sends.
struct LlPlan {
  int blocks = 1;
  int warps = 2;          // of a block
  int sender_blocks = 1;  // blocks [0, sender_blocks) send with warps [0, sender_warps)
  int sender_warps = 1;
  int receiver_block0 = 0;  // blocks [receiver_block0, blocks) receive with warps [receiver_warp0, + receiver_warps)
  int receiver_warp0 = 0;
  int receiver_warps = 1;
  int steps = 1;     // dispatch: steps of a piece, the unit of work of a warp
  bool pdl = false;  // programmatic dependent launch
  int groups = 1;    // combine: of sending blocks, each with a counter of tickets. What does not divide them is lowered
  bool streams = false;  // combine: rows come through rings in shared memory

  EP_HD int threads() const { return warps * 32; }
  EP_HD bool is_shared() const { return sender_blocks == blocks && receiver_block0 == 0 && blocks > 1; }
  EP_HD int senders() const { return sender_blocks * sender_warps; }
  EP_HD int receiver_blocks() const { return blocks - receiver_block0; }
  EP_HD int receivers() const { return receiver_blocks() * receiver_warps; }
};

struct LlDispatchSizes {
  int num_tokens = 0;     // of this rank
  int wire_bytes = 0;     // of a row
  bool is_heavy = false;  // quantised or keyed: more registers a step
};

struct LlCombineSizes {
  int num_tokens = 0;  // of this rank
  int hidden = 0;
  bool is_staged = false;  // a send or a receive
  bool is_apart = false;   // between domains: senders and receivers have blocks of their own, two at least
  int max_tokens = 0;      // streams: of any rank, so that all do or none; 0: no kernel streams these rows
};

// Blocks of an operation between domains that are for the network (LlRail).
struct RailPlan {
  int send_blocks = 1, forward_blocks = 1, sum_blocks = 0;
  int slices = 1;  // LlRail

  EP_HD int blocks() const { return send_blocks + forward_blocks + sum_blocks; }
};
struct RailSizes {
  int others = 1;        // links of other domains
  int row_channels = 1;  // of each
  int num_tokens = 0;    // the most that a rank may have
  int row_bytes = 0;     // of a row on the network
  // A dispatch, by its phases. Rows are not forwarded where receivers take them (LlRail::places_rows).
  bool sends_rows = false, forwards_routing = false, forwards_rows = false;
  bool adds_up = false;  // a combine, but for its send
  // Blocks that add up end before the others must begin, and have their SMs: LlRail::adds_rows, on a GPU of its own.
  bool ends_early = false;

  EP_HD bool shares_work() const { return sends_rows || forwards_routing || adds_up; }
};
// Of a block for each SM. Where these are few the launch has more: one of each kind, and two for the rest.
RailPlan plan_rail(const RailSizes& sizes, const Arch& arch);

LlPlan plan_dispatch(const LlDispatchSizes& sizes, const Arch& arch);
// Ranks may have different plans in a call, with as many blocks (docs/memory_model.md, forward progress).
LlPlan plan_combine(const LlCombineSizes& sizes, const Arch& arch);

std::string describe(const LlPlan& plan);
std::string describe(const RailPlan& plan);

}  // namespace ep
