// The kernel of LinkRestartParams, for any network.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/network/network.h"
#include "cuda/network/restart.h"
#include "cuda/protocol/device_state.h"

namespace ep {

constexpr int kRestartThreads = 256;

// One block. A thread calls each function.
template <Network N>
class LinkRestart {
 public:
  __device__ LinkRestart(const LinkRestartParams& p, const N& network)
      : p_(p), network_(network), masks_(p.state->far_masks), start_(ptx::global_timer_ns()) {}

  // The rest of what this rank would have posted to its peers, if it had made every call.
  __device__ void make_up() const {
    for (int i = threadIdx.x; i < num_words(); i += kRestartThreads) {
      const Word word = word_of(i);
      const LlRail& rail = p_.rails[word.kind];
      auto& posted = *p_.peers.local<uint64_t>(rail.posted_at(word.parity, word.link, word.channel));
      if (posted < word.expected) {
        network_.signal(rail.peer(word.link), rail.context(word.channel),
                        rail.signal(word.parity, rail.link, word.channel), word.expected - posted);
      }
      posted = word.expected;
    }
    for (int i = threadIdx.x; i < rail().others(); i += kRestartThreads) {
      const int peer = rail().peer(rail().other(i));
      if (masks_.is_told[peer] == 0) network_.signal(peer, LlRail::kMaskContext, rail().mask_signal(p_.peers.rank), 1);
      masks_.is_told[peer] = 0;
    }
  }

  // Until all that the peers have posted is here.
  __device__ void await_all(uint64_t cleaned) const {
    bool is_ok = true;
    for (int i = threadIdx.x; is_ok && i < num_words(); i += kRestartThreads) {
      const Word word = word_of(i);
      const LlRail& rail = p_.rails[word.kind];
      is_ok = await(rail.peer(word.link), rail.context(word.channel), rail.signal(word.parity, word.link, word.channel),
                    word.expected);
    }
    for (int i = threadIdx.x; is_ok && i < rail().others(); i += kRestartThreads) {
      const int peer = rail().peer(rail().other(i));
      is_ok = await(peer, LlRail::kMaskContext, rail().mask_signal(peer), cleaned);
    }
  }

 private:
  // Of a channel of a link.
  struct Word {
    int kind, link, parity, channel;
    uint64_t expected;
  };

  __device__ const LlRail& rail() const { return p_.rails[0]; }  // links and channels are those of both kinds
  __device__ int num_words() const { return kNumKinds * kNumBanks * rail().others() * rail().channels(); }
  __device__ Word word_of(int number) const {
    const int channels = rail().channels(), others = rail().others(), rest = number / channels / others;
    Word word{rest / kNumBanks, rail().other(number / channels % others), rest % kNumBanks, number % channels, 0};
    word.expected = signals_after(p_.epochs[word.kind], word.parity);
    return word;
  }
  // False: the signal has not come in time.
  __device__ bool await(int peer, int context, int signal, uint64_t expected) const {
    for (uint32_t polls = 1;; polls++) {
      const uint64_t seen = network_.read_signal(context, signal);
      if (seen >= expected) return true;
      if (polls % 64 != 0 || ptx::global_timer_ns() - start_ < p_.timeout_ns) continue;
      if (atomicExch(&p_.result->has_failed, 1u) != 0) return false;
      p_.result->peer = peer;
      p_.result->expected = expected;
      p_.result->seen = seen;
      return false;
    }
  }

  const LinkRestartParams& p_;
  const N& network_;
  FarMasks& masks_;
  const uint64_t start_;
};

template <Network N>
__device__ void restart_links(const LinkRestartParams& p, const typename N::Args& args) {
  const N network(args);
  const LinkRestart<N> restart(p, network);
  const uint64_t cleaned = p.state->far_masks.cleaned + 1;
  restart.make_up();
  restart.await_all(cleaned);
  __syncthreads();
  if (threadIdx.x == 0) p.state->far_masks.cleaned = cleaned;
}

}  // namespace ep
