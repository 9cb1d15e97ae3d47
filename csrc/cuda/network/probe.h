// A kernel that only moves bytes over the network: whether it works, and how long the bytes of an operation take with
// nothing else around them. No part of any operation.
#pragma once

#include <cstdint>

#include "layout/common/region.h"

namespace ep {

struct NetworkProbeResult {
  uint32_t has_failed = 0;  // a signal did not come; the rest says which
  int peer = -1, context = -1;
  uint64_t expected = 0, seen = 0;
  uint64_t timed_ns = 0;  // of the rounds after the first `warm_up`
};

constexpr int kMaxProbeContexts = 16;

// In the GPU's memory: what a probe has done. The kernel advances it when it ends, so that graphs of it can be
// replayed.
struct NetworkProbeState {
  uint64_t rounds = 0;
  uint64_t sent[2][kMaxProbeContexts] = {};  // messages to each peer, by parity of the round and by context
};

// In each round every rank puts `messages` messages to each of its peers, over the contexts in turn, and waits for as
// many from each. The ranks of a world run the same probe with one another as peers.
struct NetworkProbeParams {
  static constexpr int kMaxPeers = 64;
  int rank = 0, num_ranks = 1, num_contexts = 1;
  int num_peers = 0;
  int peers[kMaxPeers] = {};
  int messages = 1;
  uint64_t first_bytes = 16, bytes = 16;  // of the first message, of each other one
  // Message m for rank p lies at source + (p * messages + m) * bytes, and lands at target + (own rank * messages + m) *
  // bytes.
  Offset source = 0, target = 0;
  int rounds = 1, warm_up = 0;
  uint64_t timeout_ns = 0;
  NetworkProbeState* state = nullptr;
  NetworkProbeResult* result = nullptr;  // pinned

  // A network needs so many signals of each context: by the parity of the round, and by source. Without the parity, a
  // message of round n + 1 that lands first would be counted for round n.
  EP_HD static int num_signals(int num_ranks) { return 2 * num_ranks; }
  EP_HD int signal(uint64_t round, int source) const { return static_cast<int>(round & 1) * num_ranks + source; }
  // Messages of a round that go over a context.
  EP_HD uint64_t messages_of(int context) const {
    return static_cast<uint64_t>((messages - context + num_contexts - 1) / num_contexts);
  }
  // Of the `number`-th round of this kernel: which one it is of all, and the value of a signal when it has come.
  EP_HD uint64_t round(int number) const { return state->rounds + number; }
  EP_HD uint64_t expected(int number, int context) const {
    return state->sent[round(number) & 1][context] + (number / 2 + 1) * messages_of(context);
  }
};

}  // namespace ep
