// The floors of the benchmark: the time that the links take for the bytes of an operation, whatever the implementation.
//
// Pushes alone store rows full of kAbsent where a dispatch or combine would store its rows. That leaves the receivers'
// windows as they were, provided that no word lands where another operation has a row:
//   * A push is operation n of its kind, with its epoch and bank. Like every operation it begins when all ranks have
//     begun operation n - 1, and so have emptied this bank of operation n - 2: begin_op().
//   * Operation n + 2 is the next to use the bank, on any rank and with any shape, so that another rank's row may lie
//     where a push of this one went. That rank has waited for this rank's credit of operation n + 1, whose fence comes
//     after this kernel's end. So its stores come after the pushes. The same argument orders resets
//     (docs/memory_model.md).
// In between no rank reads the bank's rows: all ranks make the same calls. A rank that makes another call gets no
// routing from this one, and its deadline ends the buffer.
#pragma once

#include "cuda/launch/launch.h"
#include "cuda/ll/common/headers.cuh"
#include "cuda/ll/common/op_context.cuh"
#include "cuda/ll/dispatch/payload.cuh"

namespace ep {

// ---- Flags alone

// One block, a thread for each peer. It has an epoch of its own in the own window, and touches no other operation.
__device__ __forceinline__ void exchange_flags(const LlFloorFlagsParams& p, const LsaPeers& peers, DeviceState* state) {
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  auto* own_epoch = peers.local<uint64_t>(p.epoch);
  const int peer = threadIdx.x;
  const uint64_t epoch = ptx::ld_relaxed_gpu(own_epoch) + 1;
  const bool has_peer = peer < p.num_ranks && peer != peers.rank;
  if (has_peer) ptx::st_relaxed_sys(peers.at<uint64_t>(peer, p.flags) + peers.rank, epoch);
  EP_SHARED(OpContext, op);
  if (threadIdx.x == 0) {
    op.state = state;
    op.header = &p.header;
    op.kind = Kind::kDispatch;
    op.rank = peers.rank;
    op.epoch = epoch;
  }
  __syncthreads();
  if (threadIdx.x == 0) ptx::st_relaxed_gpu(own_epoch, epoch);  // all threads have read it
  if (!has_peer) return;
  // A peer may be an exchange ahead: flags grow.
  const uint64_t* flag = peers.local<uint64_t>(p.flags) + peer;
  uint64_t seen = ptx::ld_relaxed_sys(flag);
  WaitBudget budget;
  while (seen < epoch && !budget.is_spent(op, Awaited::kFlag, peer, epoch, seen)) seen = ptx::ld_relaxed_sys(flag);
}

// ---- Pushes alone

struct FloorPushRole : WarpRole {
  const LlFloorPushParams& p;
  const LsaPeers& peers;

  __device__ int sender() const { return warp * plan.sender_blocks + at.block; }
};

// Ranks to which a row of (own or peer's) token `token` goes, as bits.
__device__ __forceinline__ uint64_t push_targets(const LlFloorPushParams& p, int rank, int token) {
  uint64_t targets = 0;
  if (p.kind == Kind::kDispatch) {
    const int local_experts = p.shape.num_experts / p.shape.num_ranks;
#pragma unroll 8
    for (int k = 0; k < p.shape.topk && token < p.num_tokens; k++) {
      const int id = __ldg(p.handle.ids + static_cast<int64_t>(token) * p.shape.topk + k);
      if (id >= 0) targets |= 1ull << id / local_experts;
    }
  } else {
#pragma unroll 1
    for (int home = 0; home < p.shape.num_ranks; home++) {
      if (token >= __ldg(p.handle.tokens + home)) continue;
#pragma unroll 8
      for (int k = 0; k < p.map_k; k++) {
        const bool has_row = __ldg(p.handle.rows + p.offsets.slot(home, token) * p.map_k + k) != kNoRow;
        targets |= static_cast<uint64_t>(has_row) << home;
      }
    }
  }
  return targets & ~(1ull << rank);
}

// As dispatch stores its pieces, but without a load: `targets` lie in shared memory.
__device__ __forceinline__ void push_rows(const FloorPushRole& role, const WarpContext& op, const uint64_t* targets) {
  const LlFloorPushParams& p = role.p;
  const int vectors = p.row.wire_bytes() / kLaneBytes, piece_vectors = role.plan.steps * 32;
  const int pieces = ceil_div(vectors, piece_vectors), units = p.shape.max_tokens * pieces;
  const uint4 absent = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
#pragma unroll 1
  for (int unit = role.sender(); unit < units; unit += role.plan.senders()) {
    const int token = unit / pieces, first = unit % pieces * piece_vectors, end = min(first + piece_vectors, vectors);
    const uint64_t mask = targets[token];
    int peer = role.peers.rank;
#pragma unroll 1
    for (int hop = 1; hop < p.shape.num_ranks; hop++) {
      peer = peer + 1 == p.shape.num_ranks ? 0 : peer + 1;
      if ((mask >> peer & 1) == 0) continue;
      auto* row = role.peers.at<uint4>(peer, p.offsets.row(op.bank, role.peers.rank, token));
      for (int vector = first + role.lane; vector < end; vector += 32) ptx::st_row(row + vector, absent);
    }
  }
}

__device__ __forceinline__ void push_floor(const KernelArgs<LlFloorPushParams>& args, BlockPosition at,
                                           uint64_t* targets) {
  const LlFloorPushParams& p = args.params;
  const LsaPeers& peers = args.peers;
  const FloorPushRole role{{args.plan, at, lane_id(), warp_id()}, p, peers};
  EP_SHARED(OpContext, context);
  WarpContext op(context, WarpContext::NotYet{});
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  const Opening opening = open_op(context, args, p.kind);
  const int threads = role.plan.sender_warps * 32;  // the last warp is the leader warp
  for (int token = threadIdx.x; token < p.shape.max_tokens && threadIdx.x < threads; token += threads) {
    targets[token] = push_targets(p, peers.rank, token);
  }
  const bool is_ok = begin_op(context, op, args, opening);
  if (is_ok && role.is_control()) send_headers(op, p.offsets, peers);
  advance_epoch(args, opening, p.kind, at);
  if (!is_ok) return;
  if (role.is_creditor()) send_credits(op, p.offsets, peers);
  if (!role.is_planned_sender()) return;
  ptx::named_barrier(1, threads);  // of `targets`
  push_rows(role, op, targets);
}

}  // namespace ep
