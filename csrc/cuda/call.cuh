// How every kernel begins and how ranks greet one another: epochs, call records, routing messages.
#pragma once

#include "cuda/wait.cuh"
#include "runtime/params.h"
#include "runtime/plan.h"
#include "transport/lsa_peers.h"

namespace ep {

// This block of this rank: in a world on one GPU, a launch holds the blocks of all ranks.
struct BlockPosition {
  int block;
  int num_blocks;
};

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

// Reads the epoch. The last block to have read it moves it on, off the critical path; a sending half leaves that to its
// receiving half. Ends with a barrier of the block.
template <class Params>
__device__ __forceinline__ CallContext begin_call(const Params& p, DeviceState* state, int rank, Kind kind,
                                                  BlockPosition at, bool advances) {
  __shared__ uint64_t shared_epoch;
  const int k = static_cast<int>(kind);
  if (threadIdx.x == 0) shared_epoch = ptx::ld_relaxed_gpu(&state->epoch[k].epoch) + 1;
  __syncthreads();
  const uint64_t epoch = shared_epoch;
  if (threadIdx.x == 0 && advances) {
    TicketLine& ticket = state->ticket[k];
    if (atomicAdd(&ticket.started, 1u) == static_cast<uint32_t>(at.num_blocks) - 1) {
      ptx::st_relaxed_gpu(&ticket.started, 0u);
      ptx::st_relaxed_gpu(&state->epoch[k].epoch, epoch);
    }
  }
  return {state, &p.call, kind, rank, epoch, tag_of(epoch), bank_of(epoch)};
}

// One warp sends the call record to `peer`. The release orders the resets of earlier calls' banks before it; it pairs
// with the acquire in check_record().
__device__ __forceinline__ void send_record(const CallContext& context, const LlLayout& layout, const LsaPeers& peers,
                                            int peer) {
  const int lane = lane_id();
  if (lane < CallRecord::kWords) {
    auto* record = peers.at<uint64_t>(peer, layout.record(context.bank, context.rank));
    ptx::st_release_sys(record + lane, tagged(context.call->word(lane), context.tag));
  }
}

// One warp waits for the call record of `source` and compares it with the own call.
__device__ __forceinline__ void check_record(const CallContext& context, const LlLayout& layout, const LsaPeers& peers,
                                             int source) {
  const int lane = lane_id();
  const auto* record = peers.local<uint64_t>(layout.record(context.bank, source));
  uint32_t value = 0;
  if (lane < CallRecord::kWords) {
    Patience patience;
    uint64_t word = ptx::ld_acquire_sys(record + lane);
    while (!is_tagged(word, context.tag) &&
           !patience.is_over(context, Phase::kCallRecord, source, context.tag, word >> 32)) {
      word = ptx::ld_acquire_sys(record + lane);
    }
    value = is_tagged(word, context.tag) ? static_cast<uint32_t>(word) : context.call->word(lane);
  }
  const bool differs = lane < CallRecord::kComparedWords && value != context.call->word(lane);
  if (!__any_sync(~0u, differs)) return;
  CallRecord theirs;
  for (int i = 0; i < CallRecord::kWords; i++) theirs.set_word(i, __shfl_sync(~0u, value, i));
  if (lane == 0) fail(context, Failure::kOtherCall, Phase::kCallRecord, source, 0, 0, theirs);
}

// Word 6 of a record: the sender's tokens.
constexpr int kTokensWord = 6;

__device__ __forceinline__ int64_t load_id(const void* ids, bool is_idx64, int64_t index) {
  return is_idx64 ? __ldg(static_cast<const long long*>(ids) + index) : __ldg(static_cast<const int*>(ids) + index);
}

// Ranks that have an expert of the token whose choices the lanes hold.
__device__ __forceinline__ uint64_t destinations(const Shape& shape, int id) {
  const int owner = id >= 0 ? shape.owner(id) : 0;
  const uint32_t low = __reduce_or_sync(~0u, id >= 0 && owner < 32 ? 1u << owner : 0);
  if (shape.num_ranks <= 32) return low;
  const uint32_t high = __reduce_or_sync(~0u, id >= 0 && owner >= 32 ? 1u << (owner - 32) : 0);
  return static_cast<uint64_t>(high) << 32 | low;
}

// One warp sends the routing of an own token to `peer`; lane k holds choice k: its expert (or -1) and its weight.
__device__ __forceinline__ void send_routing(const CallContext& context, const Shape& shape, const LlLayout& layout,
                                             const LsaPeers& peers, int peer, int token, int id, float weight) {
  const int lane = lane_id();
  const IdFormat& ids = layout.ids;
  const bool is_there = id >= 0 && shape.owner(id) == peer;
  uint32_t word = is_there ? static_cast<uint32_t>(shape.local_expert(id)) : ids.none();
  if (ids.bits == 8) {
    word <<= 8 * (lane & 3);
    word |= __shfl_xor_sync(~0u, word, 1);
    word |= __shfl_xor_sync(~0u, word, 2);
  } else {
    word <<= 16 * (lane & 1);
    word |= __shfl_xor_sync(~0u, word, 1);
  }
  const int per_word = ids.per_word();
  if (lane % per_word == 0 && lane / per_word < ids.words()) {
    auto* target = peers.at<uint64_t>(peer, layout.id_words(context.bank, context.rank, token));
    ptx::st_relaxed_sys(target + lane / per_word, tagged(word, context.tag));
  }
  if (is_there) {
    auto* target = peers.at<uint64_t>(peer, layout.weight(context.bank, context.rank, token, lane));
    ptx::st_relaxed_sys(target, tagged(__float_as_uint(weight), context.tag));
  }
}

}  // namespace ep
