// Op headers and credits of low latency: what ranks exchange apart from routing and rows.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/ll/common/op_context.cuh"
#include "cuda/protocol/headers.cuh"
#include "runtime/ll/params.h"
#include "transport/device/lsa_peers.h"

namespace ep {
inline namespace EP_KERNELS {

// The op header of a combine: that of the params, and of which dispatch the handle is. The latter lies on the device,
// as a graph is replayed with handles that were made anew.
struct CombineHeader {
  const OpHeader& header;
  uint32_t handle;

  __device__ __forceinline__ static uint32_t load(const HandlePtrs& handle) {
    return ptx::ld_relaxed_gpu(reinterpret_cast<const uint32_t*>(handle.dispatch));
  }
  __device__ __forceinline__ uint32_t word(int index) const {
    return index == OpHeader::kLlHandle ? handle : header.word(index);
  }
};
__device__ __forceinline__ int handle_word(const OpHeader&) { return -1; }
__device__ __forceinline__ int handle_word(const CombineHeader&) { return OpHeader::kLlHandle; }

// Word `i` of the own op header's copies for all ranks, ready to be sent as soon as the epoch is known: other ranks
// wait for it, and `header` is a kernel parameter, which is slow to read through a pointer.
struct HeaderLane {
  uint64_t* target = nullptr;  // in bank 0
  uint32_t value = 0;

  template <class Header>
  __device__ __forceinline__ static HeaderLane of(const Header& header, const LlOffsets& offsets, const LsaPeers& peers,
                                                  int i) {
    const int peer = i / OpHeader::kWords, word = i % OpHeader::kWords;
    HeaderLane lane;
    lane.value = header.word(word);
    if (peer < offsets.num_ranks && reaches(peers, peer)) {
      lane.target = ptx::opaque(peers.at<uint64_t>(peer, offsets.header(0, peers.rank)) + word);
    }
    return lane;
  }
  // As word `i` of an open operation. A masked rank gets only word kIsMasked: it may still read the rest of an earlier
  // header.
  __device__ __forceinline__ void send(const WarpContext& op, const LlOffsets& offsets, int i) const {
    if (kMasksRanks && i % OpHeader::kWords == OpHeader::kIsMasked) mask_recalled(op, i / OpHeader::kWords);
    if (target == nullptr) return;
    uint64_t* word = target + op.bank * offsets.num_ranks * OpHeader::kWords;
    if (!kMasksRanks || i % OpHeader::kWords != OpHeader::kIsMasked) {
      if (!is_masked(op, i / OpHeader::kWords)) ptx::st_relaxed_sys(word, tagged(value, op.tag));
      return;
    }
    // Last, and as it is now: another block may have sent it already.
    ptx::st_relaxed_sys(word, tagged(is_masked_now(op, i / OpHeader::kWords) ? 1 : 0, op.tag));
  }
};

// One warp sends the op header to every rank of the domain, itself included. `lane`: its first 32 words.
template <class Header>
__device__ __forceinline__ void send_headers(const WarpContext& op, const LlOffsets& offsets, const LsaPeers& peers,
                                             const Header& header, const HeaderLane& lane) {
  testing_point(Point::kBeforeHeader, op);
  lane.send(op, offsets, lane_id());
#pragma unroll 1
  for (int i = lane_id() + 32; i < offsets.num_ranks * OpHeader::kWords; i += 32) {
    HeaderLane::of(header, offsets, peers, i).send(op, offsets, i);
  }
  testing_point(Point::kAfterHeader, op);
}
template <class Header>
__device__ __forceinline__ void send_headers(const WarpContext& op, const LlOffsets& offsets, const LsaPeers& peers,
                                             const Header& header) {
  send_headers(op, offsets, peers, header, HeaderLane::of(header, offsets, peers, lane_id()));
}

// One warp sends every rank a credit: the banks of all earlier operations are empty here. The fence takes longer than a
// message. No rank waits for the credit before the next operation begins, in await_credits().
__device__ __forceinline__ void send_credits(const OpContext& context, const LlOffsets& offsets,
                                             const LsaPeers& peers) {
  testing_point(Point::kBeforeCredits, context);
  __threadfence_system();
#pragma unroll 1
  for (int peer = lane_id(); peer < offsets.num_ranks; peer += 32) {
    if (!reaches(peers, peer)) continue;
    ptx::st_relaxed_sys(peers.at<uint64_t>(peer, offsets.signal(context.rank)), context.epoch);
  }
}

static __device__ __noinline__ void refuse_op(const OpContext& context, const LlOffsets& offsets, const LsaPeers& peers,
                                              int source, int handle_word, uint32_t handle) {
  refuse_header(context, peers.local<uint64_t>(offsets.header(context.bank, source)), source, handle_word, handle);
}

// One warp waits for the op headers of all ranks and compares them with the own one. `wait_cost`: optional [R], ns that
// each other rank came later are added.
template <class Header>
__device__ __forceinline__ void check_headers(const OpContext& context, const LlOffsets& offsets, const LsaPeers& peers,
                                              const Header& mine, int64_t* wait_cost = nullptr) {
  if (has_bug(Bug::kUncheckedHeaders, context.kind)) return;
  const uint64_t start = wait_cost != nullptr ? ptx::global_timer_ns() : 0;
  WaitBudget budget;
#pragma unroll 1
  for (int i = lane_id(); i < offsets.num_ranks * OpHeader::kWords; i += 32) {
    const int source = i / OpHeader::kWords, word = i % OpHeader::kWords;
    if (is_masked(context, source)) continue;
    const auto* header = peers.local<uint64_t>(offsets.header(context.bank, source)) + word;
    if (!kMasksRanks) budget = {};
    uint64_t seen = ptx::ld_relaxed_sys(header);
    while (!is_tagged(seen, context.tag) &&
           !budget.is_spent(context, Awaited::kOpHeader, source, context.tag, seen >> 32)) {
      seen = ptx::ld_relaxed_sys(header);
    }
    const bool differs = word < OpHeader::kComparedWords && is_tagged(seen, context.tag) &&
                         static_cast<uint32_t>(seen) != mine.word(word);
    if (differs) refuse_op(context, offsets, peers, source, handle_word(mine), mine.word(OpHeader::kLlHandle));
    const bool is_left =
        word == OpHeader::kIsMasked && is_tagged(seen, context.tag) && static_cast<uint32_t>(seen) != 0;
    if (kMasksRanks && is_left) ptx::st_relaxed_gpu(&context.state->masks.is_masked[source], Masks::kMasked);
    if (wait_cost != nullptr && word == OpHeader::kNumTokens && source != peers.rank) {
      wait_cost[source] += static_cast<int64_t>(ptx::global_timer_ns() - start);
    }
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
