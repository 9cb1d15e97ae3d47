// The probe's kernel, for any network.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/network/network.h"
#include "cuda/network/probe.h"

namespace ep {

constexpr int kProbeThreads = 512;

template <Network N>
__device__ bool await_signal(const N& network, const NetworkProbeParams& p, int number, int peer, int context) {
  const uint64_t expected = p.expected(number, context);
  const int signal = p.signal(p.round(number), peer);
  const uint64_t start = ptx::global_timer_ns();
  for (uint32_t polls = 1;; polls++) {
    const uint64_t seen = network.read_signal(context, signal);
    if (seen >= expected) return true;
    if (polls % 64 != 0 || ptx::global_timer_ns() - start < p.timeout_ns) continue;
    if (atomicExch(&p.result->has_failed, 1u) == 0) {
      p.result->peer = peer;
      p.result->context = context;
      p.result->expected = expected;
      p.result->seen = seen;
    }
    return false;
  }
}

// One block: a thread for each message that is under way, then one for each signal.
template <Network N>
__device__ void probe_network(const NetworkProbeParams& p, const typename N::Args& args) {
  ptx::launch_dependents();  // as operations do
  ptx::wait_for_prerequisites();
  const N network(args);
  uint64_t start = 0;
  for (int number = 0; number < p.rounds; number++) {
    const uint64_t round = p.round(number);
    if (number == p.warm_up && threadIdx.x == 0) start = ptx::global_timer_ns();
    for (int i = threadIdx.x; i < p.num_peers * p.messages; i += kProbeThreads) {
      const int peer = p.peers[i % p.num_peers], message = i / p.num_peers;
      network.put_and_signal(peer, message % p.num_contexts,
                             p.target + (static_cast<uint64_t>(p.rank) * p.messages + message) * p.bytes,
                             p.source + (static_cast<uint64_t>(peer) * p.messages + message) * p.bytes,
                             message == 0 ? p.first_bytes : p.bytes, p.signal(round, p.rank), 1);
    }
    bool has_all = true;
    for (int i = threadIdx.x; i < p.num_peers * p.num_contexts; i += kProbeThreads) {
      has_all = has_all && await_signal(network, p, number, p.peers[i % p.num_peers], i / p.num_peers);
    }
    if (__syncthreads_and(has_all) == 0) return;
  }
  if (threadIdx.x != 0) return;
  p.result->timed_ns = ptx::global_timer_ns() - start;
  for (int number = 0; number < 2; number++) {
    uint64_t* sent = p.state->sent[p.round(number) & 1];
    const int rounds = (p.rounds + 1 - number) / 2;  // of this parity
    for (int context = 0; context < p.num_contexts; context++) sent[context] += rounds * p.messages_of(context);
  }
  p.state->rounds += p.rounds;
}

}  // namespace ep
