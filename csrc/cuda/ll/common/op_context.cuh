// How every kernel of low latency begins: epoch, credits, the word by which a block learns that the operation is open.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/ll/common/far_ranks.cuh"
#include "cuda/protocol/wait.cuh"
#include "cuda/testing/testing.cuh"
#include "runtime/ll/plan.h"
#include "transport/device/lsa_peers.h"

namespace ep {
inline namespace EP_KERNELS {

// What the plan has for this warp.
struct WarpRole {
  const LlPlan& plan;
  BlockPosition at;
  int lane, warp;

  __device__ bool is_planned_sender() const { return at.block < plan.sender_blocks && warp < plan.sender_warps; }
  __device__ bool is_planned_receiver() const {
    return at.block >= plan.receiver_block0 && warp >= plan.receiver_warp0 &&
           warp < plan.receiver_warp0 + plan.receiver_warps;
  }
  // The control warp exchanges op headers with the other ranks. Another warp (if there are two blocks) sends them
  // credits.
  __device__ bool is_control() const { return at.block == 0 && warp == plan.warps - 1; }
  __device__ bool is_creditor() const { return at.block == min(1, at.num_blocks - 1) && warp == plan.warps - 1; }
};

// Whether stores reach the rank's window: it is of the own domain.
__device__ __forceinline__ bool reaches(const LsaPeers& peers, int rank) {
  return !kCrossesDomains || static_cast<unsigned>(rank - peers.first) < peers.size;
}

// What this rank has of a token of `home`, for a sum, goes to rank target_of(home), to the slot of source
// slot_source(home): to the home rank or, where that is in another domain, to the one of its place among the ranks of
// the own link, which sends it.
__device__ __forceinline__ int target_of(const LsaPeers& peers, int home) {
  if (reaches(peers, home)) return home;
  const int link_size = peers.link_size;
  return peers.rank - peers.rank % link_size + home % link_size;
}
__device__ __forceinline__ int slot_source(const LsaPeers& peers, int home) {
  if (reaches(peers, home)) return peers.rank;
  const int link_size = peers.link_size;
  return home - home % link_size + peers.rank % link_size;
}

// Blocks that read the epoch of an operation. In front of those at `at` are the ones of the rail, if there is one.
template <class Args>
__device__ __forceinline__ int num_readers(const Args& args, BlockPosition at) {
  if constexpr (requires { args.rail; }) return args.rail.blocks() + at.num_blocks;
  return at.num_blocks;
}

__device__ __forceinline__ bool is_leader_warp() { return threadIdx.x >= blockDim.x - 32; }

// Whether ranks `lane` and `lane` + 32 are masked; further ranks are looked at when it is noted.
struct MaskedLane {
  uint32_t is_masked[2];

  __device__ __forceinline__ void load(const DeviceState* state) {
    for (int i = 0; i < 2; i++) is_masked[i] = ptx::ld_relaxed_gpu(&state->masks.is_masked[lane_id() + 32 * i]);
  }
  // By the leader warp, for the other warps of its block.
  __device__ __forceinline__ void note(OpContext& context, int num_ranks) const {
    const Masks& masks = context.state->masks;
    uint32_t any = 0;
#pragma unroll 1
    for (int i = 0; i < RankMask::words_of(num_ranks); i++) {
      const uint32_t mine = i == 0   ? is_masked[0]
                            : i == 1 ? is_masked[1]
                                     : ptx::ld_relaxed_gpu(&masks.is_masked[lane_id() + 32 * i]);
      const uint32_t word = __ballot_sync(~0u, mine != 0);
      if (lane_id() == 0) context.masked[i] = word;
      any |= word;
    }
    if (lane_id() == 0) context.are_any_masked = any;
    __syncwarp();
  }
};

// An operation begins with loads whose results are used later: the last warp of a block loads the epoch and the credits
// of all ranks (an acquire holds up what follows it), the others load what they send first. begin_op() uses them.
//
// Instructions count: a warp alone needs 5 cycles for each, and an operation of one token takes 4,000. What can be done
// before the epoch is known is done before, and the epoch is loaded first.
struct Opening {
  uint64_t last_epoch = 0;
  uint64_t credit = 0;  // of rank `lane`
  uint32_t has_failed = 0;
  Kind kind;
  ptx::SharedAddress opened_at;  // the word of tag, bank and is_open
  MaskedLane masked;             // kMasksRanks
};

struct Nothing {
  __device__ void operator()() const {}
};

// The flag must be closed before other warps poll it. The leader warp does not wait at the barrier. `others_prefetch`:
// the first loads of the other warps, and what they can do meanwhile. `leader_prefetch`: more loads of the leader warp.
constexpr int kOpeningBarrier = 2, kTestingBarrier = 3;
template <class Args, class Prefetch = Nothing, class LeaderPrefetch = Nothing>
__device__ __forceinline__ Opening open_op(OpContext& op, const Args& args, Kind kind, Prefetch others_prefetch = {},
                                           LeaderPrefetch leader_prefetch = {}) {
  testing_point_before_op(args.state->epoch[static_cast<int>(kind)].epoch, kind, args.peers.rank);
  Opening opening;
  opening.kind = kind;
  opening.opened_at = ptx::opaque(ptx::shared_address(&op.tag));
  if (!is_leader_warp()) {
    others_prefetch();
    ptx::named_barrier(kOpeningBarrier, static_cast<int>(blockDim.x));
    return opening;
  }
  opening.last_epoch = ptx::ld_relaxed_gpu(&args.state->epoch[static_cast<int>(kind)].epoch);
  opening.has_failed = ptx::ld_relaxed_gpu(&args.state->failure_flag.has_failed);
  if (kMasksRanks) opening.masked.load(args.state);
  leader_prefetch();
  op.is_open = OpContext::kClosed;
  op.state = args.state;
  op.header = &args.params.header;
  op.kind = kind;
  op.rank = args.peers.rank;
  note_network(op, args);
  ptx::named_barrier_arrive(kOpeningBarrier, static_cast<int>(blockDim.x));
  if (lane_id() < args.num_ranks) opening.credit = ptx::ld_acquire_sys(args.credits + lane_id());
  return opening;
}

// Waits until every rank has begun the operation before this one, and so has emptied the bank that this one writes to.
// The acquire pairs with send_credits(); the flag of the block passes it on. Masked ranks are not waited for. False:
// the wait was given up.
template <class Args>
__device__ __noinline__ bool await_credits(const OpContext& op, const Args& args, uint64_t last_epoch,
                                           uint64_t credit_of_lane) {
  WaitBudget budget;
#pragma unroll 1
  for (int source = lane_id(); source < args.num_ranks; source += 32) {
    if (is_masked(op, source) || !reaches(args.peers, source)) continue;
    uint64_t credit = credit_of_lane;
    if (source >= 32) credit = ptx::ld_acquire_sys(args.credits + source);
    if (!kMasksRanks) budget = {};
    while (credit < last_epoch) {
      if (budget.is_spent(op, Awaited::kArrivalSignal, source, last_epoch, credit)) {
        if (!kMasksRanks || op.has_failed()) return false;
        break;
      }
      credit = ptx::ld_acquire_sys(args.credits + source);
    }
  }
  return true;
}

// The leader warp fills the block's context, the other warps wait for it: each as late as it can, as a barrier would
// make all wait for the slowest. `op`: the warp's. False: the buffer has failed, and nothing may be sent.
template <class Args>
__device__ __forceinline__ bool begin_op(OpContext& context, WarpContext& op, const Args& args,
                                         const Opening& opening) {
  if (!is_leader_warp()) {
    testing_barrier(kTestingBarrier, static_cast<int>(blockDim.x));
    OpenWord word;
    do {
      word.value = ptx::ld_acquire_shared_u64(opening.opened_at);
    } while (word.is_open() == OpContext::kClosed);
    op.open(word);
    return word.is_open() == OpContext::kOpen;
  }
  const uint64_t epoch = opening.last_epoch + 1;
  context.epoch = epoch;
  op.tag = tag_of(epoch);
  op.bank = has_bug(Bug::kOneBank, opening.kind) ? 0 : bank_of(epoch);
  if (kMasksRanks) opening.masked.note(context, args.num_ranks);
  const bool has_credit = lane_id() >= args.num_ranks || opening.credit >= opening.last_epoch ||
                          is_masked(context, lane_id()) || !reaches(args.peers, lane_id()) ||
                          has_bug(Bug::kIgnoredCredits, opening.kind);
  bool is_ok = opening.has_failed == 0;
  if (args.num_ranks > 32 || !__all_sync(~0u, has_credit)) {
    is_ok = await_credits(context, args, opening.last_epoch, opening.credit) && is_ok;
    if (kMasksRanks) {
      MaskedLane masked;
      masked.load(context.state);
      masked.note(context, args.num_ranks);
    }
  }
  is_ok = __all_sync(~0u, is_ok);
  __syncwarp();
  const auto is_open = is_ok ? OpContext::kOpen : OpContext::kFailed;
  ptx::st_release_shared_u64(opening.opened_at, OpenWord::of(op.tag, op.bank, is_open).value);
  testing_barrier(kTestingBarrier, static_cast<int>(blockDim.x));
  return is_ok;
}

// The leader warp calls it once in an operation; a send part leaves it to the receive part. The last block to call it
// advances the epoch: all have read it by then. It comes after what other ranks wait for, as the ticket takes its time.
template <class Args>
__device__ __forceinline__ void advance_epoch(const Args& args, const Opening& opening, Kind kind, BlockPosition at) {
  if (!is_leader_warp() || lane_id() != 0) return;
  const int k = static_cast<int>(kind);
  testing_point_before_epoch(opening.last_epoch, kind, args.peers.rank);
  TicketLine& ticket = args.state->ticket[k];
  const uint32_t place = atomicAdd(&ticket.started, 1u);
  if (has_bug(Bug::kEarlyEpoch, kind) && place == 0) {
    ptx::st_relaxed_gpu(&args.state->epoch[k].epoch, opening.last_epoch + 1);
  }
  if (place == static_cast<uint32_t>(num_readers(args, at)) - 1) {
    ptx::st_relaxed_gpu(&ticket.started, 0u);
    if (has_bug(Bug::kReusedEpoch, kind) && opening.last_epoch % 5 == 4) return;
    ptx::st_relaxed_gpu(&args.state->epoch[k].epoch, opening.last_epoch + 1);
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
