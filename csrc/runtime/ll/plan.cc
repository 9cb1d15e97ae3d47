#include "runtime/ll/plan.h"

#include <algorithm>
#include <climits>

#include "base/check.h"

namespace ep {
namespace {

// Up to so many, what counts is how soon the first rows leave.
constexpr int kFewTokens = 48;
constexpr int kFewPieces = 48 * 28;  // of combine, 256 numbers each
constexpr int kFewBlocks = 48;       // below, what counts is how much a sending block has under way
// With more tokens a dispatch has larger pieces and, on few SMs, shared blocks: ranks that have these have pieces of
// one size.
constexpr int kSmallTokens = 16;
// Dispatch: from so many tokens on, up to so many SMs (heavy: of rows that are converted or the caller's), all blocks
// send and receive, as what an SM stores takes the time. Measured with 17, 32, 64, 128, 256 and 512 tokens.
constexpr struct {
  int tokens, sms, heavy_sms;
} kShared[] = {{256, 96, INT_MAX}, {128, 32, 80}, {kFewTokens + 1, 24, 40}, {kSmallTokens + 1, 40, 48}};
// A warp of a combine has the loads of one piece under way at a time. Where it has this many pieces and more, and SMs
// are few, rings of loads take less time than waits.
constexpr int kMostStreamSms = 48, kStreamPieces = 32;
constexpr int kSliceBytes = 32 * kStepBytes;  // of a row channel of a link: what keeps the warps of a block busy

int most_shared_sms(int tokens, bool is_heavy) {
  for (const auto& from : kShared) {
    if (tokens >= from.tokens) return is_heavy ? from.heavy_sms : from.sms;
  }
  return 0;
}

// Blocks that only send, the lowest ones: a quarter fills the links, the rest have the copying to do.
int sender_share(int blocks, int share_of_132) { return std::clamp((blocks * share_of_132 + 66) / 132, 1, blocks - 1); }

}  // namespace

RailPlan plan_rail(const RailSizes& sizes, const Arch& arch) {
  const int num_sms = arch.num_sms;
  // Of each kind: an operation has two kinds at most.
  const int most = std::max(sizes.ends_early ? num_sms * 5 / 6 : num_sms * 2 / 7, 1);
  const int shares = sizes.others * std::clamp(sizes.num_tokens, 1, sizes.row_channels);
  const int64_t share_bytes = static_cast<int64_t>(ceil_div(sizes.num_tokens, sizes.row_channels)) * sizes.row_bytes;
  RailPlan plan;
  if (sizes.shares_work()) {
    const auto most_slices = static_cast<int>(std::clamp<int64_t>(share_bytes / kSliceBytes, 1, most));
    plan.slices = std::clamp(most / (sizes.others + shares), 1, most_slices);
  }
  // More blocks than units of work have nothing to do. A rank's own record is one unit.
  const int row_units = shares * plan.slices, record_units = sizes.others * plan.slices;
  if (sizes.sends_rows) plan.send_blocks = std::min(1 + row_units, most);
  const int forward_units = sizes.forwards_routing ? record_units : sizes.others;
  plan.forward_blocks = std::min(forward_units + (sizes.forwards_rows ? row_units : 0), most);
  if (sizes.adds_up) plan.sum_blocks = std::min(row_units, most);
  return plan;
}

LlPlan plan_dispatch(const LlDispatchSizes& sizes, const Arch& arch) {
  const int num_sms = arch.num_sms;
  LlPlan plan;
  const int row_steps = ceil_div(sizes.wire_bytes, kStepBytes);
  plan.blocks = num_sms;
  plan.steps = 2;
  if (num_sms == 1) {
    plan.sender_warps = plan.receiver_warp0 = plan.receiver_warps = 8;
    plan.warps = 17;
    return plan;
  }
  // Four steps a piece where they fit the row as well as two, and there is enough to do for all warps.
  const bool fits = row_steps % 4 == 0 || row_steps % 4 == 3;
  if (!sizes.is_heavy && fits && sizes.num_tokens > kSmallTokens) plan.steps = 4;
  if (can_share_blocks(sizes.is_heavy, plan.steps) && num_sms <= most_shared_sms(sizes.num_tokens, sizes.is_heavy)) {
    plan.warps = sizes.is_heavy ? 20 : 16;
    plan.sender_blocks = num_sms;
    plan.sender_warps = plan.receiver_warp0 = 4;
    plan.receiver_warps = plan.warps - plan.receiver_warp0 - 1;
    return plan;
  }
  plan.warps = plan.receiver_warps = sizes.is_heavy && sizes.num_tokens > kFewTokens ? 20 : 16;
  if (sizes.num_tokens <= kFewTokens) {
    plan.sender_warps = sizes.num_tokens > 16 ? 4 : 8;
    plan.sender_blocks = sender_share(plan.blocks, sizes.is_heavy || sizes.num_tokens <= 16 ? 20 : 16);
  } else {
    plan.sender_warps = sizes.is_heavy || num_sms < kFewBlocks ? 8 : 4;
    plan.sender_blocks = sender_share(plan.blocks, sizes.is_heavy ? 28 : 32);
  }
  plan.receiver_block0 = plan.sender_blocks;
  return plan;
}

LlPlan plan_combine(const LlCombineSizes& sizes, const Arch& arch) {
  const int num_sms = arch.num_sms;
  LlPlan plan;
  plan.blocks = num_sms;
  plan.warps = 20;
  plan.groups = 4;
  const int row_pieces = ceil_div(sizes.hidden, 256), pieces = sizes.num_tokens * row_pieces;
  if (num_sms <= kMostStreamSms && sizes.max_tokens * row_pieces > kStreamPieces * num_sms) {
    plan.streams = true;
    plan.warps = 16;
    plan.sender_blocks = num_sms;
    plan.sender_warps = plan.receiver_warp0 = 9;  // which receive when they have sent
    plan.receiver_warps = 6;
    return plan;
  }
  const bool is_mixed = sizes.is_staged || pieces <= kFewPieces || num_sms == 1;
  if (is_mixed && !sizes.is_apart) {
    plan.sender_blocks = num_sms;
    plan.sender_warps = plan.receiver_warp0 = 9;
    plan.receiver_warps = 10;
    return plan;
  }
  // The loads of a receiver would queue up behind the remote stores of its SM.
  plan.sender_blocks = plan.receiver_block0 = sender_share(num_sms, 60);
  plan.sender_warps = 16;
  plan.receiver_warps = 19;
  return plan;
}

std::string describe(const LlPlan& plan) {
  return concat(plan.blocks, " blocks of ", plan.warps, " warps: blocks [0, ", plan.sender_blocks, ") send with ",
                plan.sender_warps, " warps, blocks [", plan.receiver_block0, ", ", plan.blocks, ") receive with ",
                plan.receiver_warps, " warps from warp ", plan.receiver_warp0, "; steps of a piece: ", plan.steps,
                ", groups of senders: ", plan.groups, plan.streams ? ", rings" : "",
                plan.pdl ? ", programmatic launch" : "");
}

std::string describe(const RailPlan& plan) {
  return concat("for links ", plan.send_blocks, " blocks send, ", plan.forward_blocks, " forward, ", plan.sum_blocks,
                " add up; slices of a channel: ", plan.slices);
}

}  // namespace ep
