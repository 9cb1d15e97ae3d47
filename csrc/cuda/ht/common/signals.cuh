// Signals: words that hold the epoch of the last operation that was announced.
#pragma once

#include "cuda/protocol/wait.cuh"
#include "layout/ht/offsets.h"
#include "transport/device/lsa_peers.h"

namespace ep {
inline namespace EP_KERNELS {

__device__ __forceinline__ uint64_t* signal_word(const HtOffsets& offsets, const LsaPeers& peers, int at_rank,
                                                 HtSignal which, int source, int chunk) {
  return peers.at<uint64_t>(at_rank, offsets.signal(which, source)) + chunk;
}

// The caller's thread has seen, by a fence or a barrier, all that the signal announces. `source`: whose signal it is.
__device__ __forceinline__ void send_signal_of(const OpContext& op, const HtOffsets& offsets, const LsaPeers& peers,
                                               int peer, HtSignal which, int source, int chunk) {
  __threadfence_system();
  ptx::st_relaxed_sys(signal_word(offsets, peers, peer, which, source, chunk), op.epoch);
}
__device__ __forceinline__ void send_signal(const OpContext& op, const HtOffsets& offsets, const LsaPeers& peers,
                                            int peer, HtSignal which, int chunk) {
  send_signal_of(op, offsets, peers, peer, which, op.rank, chunk);
}

// Acquire, if true.
__device__ __forceinline__ bool is_signalled(const OpContext& op, const HtOffsets& offsets, const LsaPeers& peers,
                                             HtSignal which, int source, int chunk) {
  return ptx::ld_acquire_sys(signal_word(offsets, peers, peers.rank, which, source, chunk)) >= op.epoch;
}

// Acquire. False: the wait was given up. Each acquire empties the SM's L1, so long waits poll without.
__device__ __forceinline__ bool await_signal(const OpContext& op, const HtOffsets& offsets, const LsaPeers& peers,
                                             HtSignal which, int source, int chunk, Awaited awaited) {
  const uint64_t* word = signal_word(offsets, peers, peers.rank, which, source, chunk);
  WaitBudget budget;
  uint64_t seen = ptx::ld_relaxed_sys(word);
  while (seen < op.epoch) {
    if (budget.is_spent(op, awaited, source, op.epoch, seen)) return false;
    seen = ptx::ld_relaxed_sys(word);
  }
  ptx::ld_acquire_sys(word);
  return true;
}

}  // namespace EP_KERNELS
}  // namespace ep
