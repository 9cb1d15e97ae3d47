// How kernels of high throughput begin. Blocks of one GPU need not run at the same time: what a rank owes the others is
// given out by counters, so that the blocks that run do all of it. Apart from such work they wait only for what block 0
// of each rank sends first.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/ht/common/ht_args.cuh"
#include "cuda/testing/testing.cuh"
#include "layout/ht/offsets.h"

namespace ep {
inline namespace EP_KERNELS {

// What the threads of a block know of their place.
struct HtBlock {
  BlockPosition at;
  int lane = lane_id(), warp = warp_id();

  __device__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ bool is_first() const { return at.block == 0; }
};

struct HtOpContext : OpContext {
  uint32_t handle;  // OpHeader::kHandle. Read with the epoch: a graph is replayed with handles that were made anew

  // Of the op header that this rank sends.
  __device__ __forceinline__ uint32_t header_word(int index) const {
    return index == OpHeader::kHandle ? handle : header->word(index);
  }
};

// True for all threads of the block if one of them has given up a wait, or has seen another op header. A barrier. A
// thread that gave up reads what it wrote itself.
__device__ __forceinline__ bool block_has_failed(const OpContext& op) {
  return __syncthreads_or(op.has_given_up != 0) != 0;
}

// One thread of each block that has read the epoch.
__device__ __forceinline__ void move_ht_epoch(const OpContext& op, TicketLine& ticket, EpochLine& line,
                                              BlockPosition at) {
  testing_point_before_epoch(op.epoch - 1, op.kind, op.rank);
  __threadfence();  // the epoch is read before others may advance it
  const uint32_t place = atomicAdd(&ticket.started, 1u);
  if (has_bug(Bug::kEarlyEpoch, op.kind) && place == 0) ptx::st_relaxed_gpu(&line.epoch, op.epoch);
  if (place != static_cast<uint32_t>(at.num_blocks) - 1) return;
  ptx::st_relaxed_gpu(&ticket.started, 0u);
  if (has_bug(Bug::kReusedEpoch, op.kind) && op.epoch % 5 == 0) return;
  ptx::st_relaxed_gpu(&line.epoch, op.epoch);
}

// Release: this rank's last operation is over, so what it wrote is there, and what it read may be written again.
// Receivers acquire by the words of the op header, so only the warp that stores them fences, and no other word of the
// message has to come after: the header may go long before the rest. What this kernel itself does is not released.
__device__ __forceinline__ void send_header(const HtOpContext& op, const HtOffsets& offsets, const LsaPeers& peers) {
  testing_point(Point::kBeforeHeader, op);
  __threadfence_system();
  const NearRanks near = NearRanks::of(peers, offsets.topology.num_ranks);
#pragma unroll 1
  for (int i = lane_id(); i < OpHeader::kWords * near.size; i += 32) {
    const int peer = near.first + i / OpHeader::kWords, index = i % OpHeader::kWords;
    ptx::st_relaxed_sys(peers.at<uint64_t>(peer, offsets.message_word(op.bank, op.rank, index)),
                        tagged(op.header_word(index), op.tag));
  }
}

static __device__ __noinline__ void send_header_after_all(const HtOpContext& op, const HtOffsets& offsets,
                                                          const LsaPeers& peers) {
  send_header(op, offsets, peers);
}

// Every block reads the epoch. The last block to have done so advances it, unless another kernel belongs to the
// operation. False: the buffer has failed. If it has failed in this operation, because of what another rank has sent,
// that rank must still get this rank's op header: the first block sends it, as it would have if it had come sooner.
template <class Args>
__device__ __forceinline__ bool open_ht_op(HtOpContext& op, const Args& args, Kind kind, BlockPosition at,
                                           bool is_first_kernel, bool is_last_kernel) {
  const int k = static_cast<int>(kind);
  if (threadIdx.x == 0) {
    testing_point_before_op(args.state->ht_epoch[k].epoch, kind, args.peers.rank);
    op.state = args.state;
    op.header = &args.params.header;
    op.kind = kind;
    op.rank = args.peers.rank;
    const uint64_t last_epoch = ptx::ld_relaxed_gpu(&args.state->ht_epoch[k].epoch);
    const uint32_t has_failed = ptx::ld_relaxed_gpu(&args.state->failure_flag.has_failed);
    const int32_t* given = args.params.given_dispatch();
    op.handle = given == nullptr ? 0 : ptx::ld_relaxed_gpu(reinterpret_cast<const uint32_t*>(given));
    op.epoch = last_epoch + 1;
    op.tag = tag_of(op.epoch);
    op.bank = has_bug(Bug::kOneBank, kind) ? 0 : bank_of(op.epoch);
    op.has_given_up = 0;
    op.is_open = has_failed == 0                  ? OpContext::kOpen
                 : has_failed == failure_mark(op) ? OpContext::kFailedMeanwhile
                                                  : OpContext::kFailed;
  }
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1 && is_last_kernel) {
    move_ht_epoch(op, args.state->ht_ticket[k], args.state->ht_epoch[k], at);
  }
  if (op.is_open == OpContext::kFailedMeanwhile && is_first_kernel && at.block == 0 && warp_id() == 0) {
    send_header_after_all(op, args.params.offsets, args.peers);
  }
  return op.is_open == OpContext::kOpen;
}

__device__ __forceinline__ HtCounters& counters_of(const OpContext& op) {
  return op.state->ht_counters[static_cast<int>(op.kind)][op.epoch & 1];
}

// The first block clears the counters of the next operation: its last user, the operation before this one, is over.
__device__ __forceinline__ void clear_next_counters(const OpContext& op, int num_ranks) {
  if (has_bug(Bug::kSkippedReset, op.kind)) return;
  auto* words = reinterpret_cast<uint32_t*>(&op.state->ht_counters[static_cast<int>(op.kind)][~op.epoch & 1]);
  const int count = static_cast<int>(offsetof(HtCounters, ready) / 4) + num_ranks * kHtChunks;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) words[i] = 0;
}

}  // namespace EP_KERNELS
}  // namespace ep
