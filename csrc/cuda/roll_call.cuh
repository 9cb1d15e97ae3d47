// Whom a dispatch hears, where late ranks are masked: the places of rows follow from the routing of all sources, so all
// blocks must leave out the same ones, and none that another block has heard in the last moment. One warp listens to
// all, and tells the others.
#pragma once

#include "cuda/ll_dispatch_send.cuh"

namespace ep {
inline namespace EP_KERNELS {

// A word of a source's routing, beside its call record.
struct RoutingWord {
  int source, token;
  const uint64_t *at, *record;
  uint64_t word, count, is_masked_there;

  // Word `i` of all.
  __device__ __forceinline__ void load(const DispatchRole& role, const OpenCall& call, int i) {
    const LlLayout& layout = role.p.layout;
    const int slot = role.geometry.by_id_words.divide(i);
    source = role.geometry.by_max_tokens.divide(slot);
    token = role.geometry.by_max_tokens.remainder(slot, source);
    at = role.peers.local<uint64_t>(layout.id_words<kMasksRanks>(call.bank, source, token)) +
         role.geometry.by_id_words.remainder(i, slot);
    record = role.peers.local<uint64_t>(layout.record(call.bank, source));
    load();
  }
  __device__ __forceinline__ void load() {
    word = ptx::ld_relaxed_sys(at);
    count = ptx::ld_relaxed_sys(record + CallRecord::kNumTokens);
    is_masked_there = ptx::ld_relaxed_sys(record + CallRecord::kIsMasked);
  }
  // It has come, or there is no such token.
  __device__ __forceinline__ bool is_heard(uint32_t tag) const {
    return is_tagged(is_masked_there, tag) &&
           (is_tagged(word, tag) || (is_tagged(count, tag) && token >= static_cast<int>(static_cast<uint32_t>(count))));
  }
  // Waits for it. False: the source is masked or has masked this rank, or the wait was given up.
  __device__ __forceinline__ bool hear(const OpenCall& call, Patience& patience) {
    if (is_masked(call, source)) return false;  // it may have sent, if it has not heard of it
    while (!is_heard(call.tag)) {
      if (patience.is_over(call, Phase::kRouting, source, call.tag, word >> 32)) return false;
      load();
    }
    if (static_cast<uint32_t>(is_masked_there) == 0) return true;
    ptx::st_relaxed_gpu(&call.context.state->masks.is_masked[source], 1);
    return false;
  }
};

// One warp of one block. It waits for no other block of receivers.
static __device__ __noinline__ void call_roll(const DispatchRole role, const CallContext& context) {
  constexpr int kAhead = 8;
  const OpenCall call(context);
  const int count = role.p.shape.num_ranks * role.p.shape.max_tokens * role.p.layout.ids.words();
  uint64_t left_out = 0;
  Patience patience;
#pragma unroll 1
  for (int first = lane_id(); first < count; first += 32 * kAhead) {
    RoutingWord words[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; q++) {
      if (first + 32 * q < count) words[q].load(role, call, first + 32 * q);
    }
#pragma unroll
    for (int q = 0; q < kAhead; q++) {
      if (first + 32 * q < count && !words[q].hear(call, patience)) left_out |= 1ull << words[q].source;
    }
  }
  __syncwarp();
  const uint32_t low = __reduce_or_sync(~0u, static_cast<uint32_t>(left_out));
  const uint32_t high = __reduce_or_sync(~0u, static_cast<uint32_t>(left_out >> 32));
  if (lane_id() >= 2) return;
  ptx::st_relaxed_gpu(&context.state->masks.roll[lane_id()], tagged(lane_id() == 0 ? low : high, call.tag));
}

// One warp of each block; a barrier hands on what it has found. Ends when the roll has been called.
static __device__ __noinline__ void await_roll(const CallContext& context) {
  if (lane_id() >= 2) return;
  uint64_t word;
  do {
    word = ptx::ld_relaxed_gpu(&context.state->masks.roll[lane_id()]);
  } while (!is_tagged(word, context.tag) && !context.has_failed());
  context.left_out[lane_id()] = static_cast<uint32_t>(word);
}

}  // namespace EP_KERNELS
}  // namespace ep
