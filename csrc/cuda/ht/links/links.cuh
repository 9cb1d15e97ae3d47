// What high throughput's blocks do over the network: how they wait for it, how they send, how op messages cross. A rank
// waits for its rail peers only in what none of them waits for: the first block of each sends its op message before it
// waits, and warps send the own rows before they wait for others'.
#pragma once

#include "cuda/ht/common/messages.cuh"
#include "cuda/testing/stamps.cuh"

namespace ep {
inline namespace EP_KERNELS {

__device__ __forceinline__ HtRailCounters& rail_counters_of(const OpContext& op) {
  return op.state->ht_rail_counters[static_cast<int>(op.kind)][op.epoch & 1];
}

// As clear_next_counters() does.
__device__ __forceinline__ void clear_next_rail_counters(const OpContext& op, const HtRail& rail) {
  HtRailCounters& next = op.state->ht_rail_counters[static_cast<int>(op.kind)][~op.epoch & 1];
  if (threadIdx.x == 0) next.taken = next.finished = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rail.num_domains * kHtRailChunks; i += static_cast<int>(blockDim.x)) {
    if (i < rail.num_domains) next.places[i] = 0;
    next.done[i] = 0;
  }
}

// One thread waits for a channel of the rail peer in `domain`. False: the wait was given up. Here and in post() the
// network's code stands once: it takes many registers. Both wait, so lanes that have called one of them meet at a
// __syncwarp() before the warp does anything together: nvcc takes a warp for converged behind such a call.
static __device__ __noinline__ bool await_channel(const OpContext& op, const HtRailPart part, int domain, int channel) {
  if (has_bug(Bug::kSkippedWait, op.kind) && channel == kFirstChunkChannel + 1) return true;
  const HtRail& rail = part.rail;
  const EP_NETWORK network = part.network();
  const bool is_one = has_bug(Bug::kOneParity, op.kind);
  const uint64_t expected = is_one ? op.epoch : HtRail::expected(op.epoch);
  const int word = rail.signal(is_one ? 0 : bank_of(op.epoch), domain, channel), context = rail.context(channel);
  WaitBudget budget;
  uint64_t seen = network.read_signal(context, word);
  while (seen < expected) {
    if (budget.is_spent(op, Awaited::kRail, rail.peer(domain), expected, seen)) return false;
    seen = network.read_signal(context, word);
  }
  return true;
}

// All lanes of a warp.
__device__ __forceinline__ bool warp_awaits_channel(const OpContext& op, const HtRailPart& part, int domain,
                                                    int channel) {
  bool ok = true;
  if (lane_id() == 0) ok = await_channel(op, part, domain, channel);
  __syncwarp();
  ok = __all_sync(~0u, ok) != 0;
  __syncwarp();
  return ok;
}

// One thread sends what it and others have stored at `source`, which it has seen by a barrier or an acquire; a signal
// alone if that is nothing. It waits where the network's queue is full.
static __device__ __noinline__ void post(const OpContext& op, const HtRailPart part, int domain, int channel,
                                         Offset target, Offset source, uint64_t bytes) {
  const HtRail& rail = part.rail;
  const EP_NETWORK network = part.network();
  const int parity = has_bug(Bug::kOneParity, op.kind) ? 0 : bank_of(op.epoch);
  const int signal = rail.signal(parity, rail.domain, channel), context = rail.context(channel);
  if (bytes == 0) return network.signal(rail.peer(domain), context, signal, 1);
  __threadfence_system();  // pairs with the network, which reads the source
  network.put_and_signal(rail.peer(domain), context, target, source, bytes, signal, 1);
}

__device__ __forceinline__ void stamp_put(const OpContext& op) {
  stamp_lane(Stamp::kFirstPut, op.rank, true);
  stamp_lane(Stamp::kLastPut, op.rank);
}

// Nothing is to be sent on these channels in this operation. Some threads, each with a number.
__device__ __forceinline__ void post_nothing(const OpContext& op, const HtRailPart& part, int first_channel,
                                             int num_channels, int thread, int threads) {
  const int others = part.rail.others();
#pragma unroll 1
  for (int i = thread; i < others * num_channels; i += threads) {
    post(op, part, part.rail.other(i % others), first_channel + i / others, 0, 0, 0);
  }
  __syncwarp();
}

// A warp waits for these channels of all rail peers, so that nothing of a call is under way when it ends.
__device__ __forceinline__ bool await_channels(const OpContext& op, const HtRailPart& part, int first_channel,
                                               int num_channels) {
  const int others = part.rail.others();
  bool ok = true;
#pragma unroll 1
  for (int i = lane_id(); i < others * num_channels; i += 32) {
    ok = ok && await_channel(op, part, part.rail.other(i % others), first_channel + i / others);
  }
  __syncwarp();
  ok = __all_sync(~0u, ok) != 0;
  __syncwarp();
  return ok;
}

// ---- Op messages. All threads of the first block

// The own one to the rail peers, and theirs to the ranks of this domain, as if the peer had stored it there itself.
// Acquire of what the peers have announced by it, and release to those who see it.
template <class WordOf>
__device__ __forceinline__ void exchange_messages(const HtOpContext& op, const HtOffsets& offsets,
                                                  const LsaPeers& peers, const HtRailPart& part, int words,
                                                  const WordOf& word_of) {
  const HtRail& rail = part.rail;
  const int staging = has_bug(Bug::kOneStagingBank, op.kind) ? 0 : op.bank;
  const Offset own = rail.own_record(staging);
  auto* record = peers.local<uint32_t>(own);
#pragma unroll 1
  for (int i = threadIdx.x; i < words; i += static_cast<int>(blockDim.x)) {
    record[i] = i < OpHeader::kWords ? op.header_word(i) : word_of(i);
  }
  __syncthreads();
  const auto bytes = static_cast<uint64_t>(align_up(words * 4, 16));
  if (threadIdx.x == 0) {
    for (int i = 0; i < rail.others(); i++) {
      post(op, part, rail.other(i), kRecordChannel, rail.record_from(op.bank, rail.domain), own, bytes);
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < rail.others(); i++) {
    const int domain = rail.other(i), source = rail.peer(domain);
    bool ok = true;
    if (threadIdx.x == 0) ok = await_channel(op, part, domain, kRecordChannel);
    __syncwarp();
    if (__syncthreads_or(!ok)) return;  // the waits for the message are given up, too
    __threadfence_system();
    const auto* theirs = peers.local<uint32_t>(rail.record_from(op.bank, domain));
#pragma unroll 1
    for (int n = threadIdx.x; n < words * rail.domain_size; n += static_cast<int>(blockDim.x)) {
      const int lsa = n / words, index = n - lsa * words;
      auto* target = peers.at<uint64_t>(rail.near_rank(lsa), offsets.message_word(op.bank, source, index));
      ptx::st_relaxed_sys(target, tagged(ptx::ld_relaxed_sys(theirs + index), op.tag));
    }
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
