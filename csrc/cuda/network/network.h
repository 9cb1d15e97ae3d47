// The network as a kernel sees it: what carries bytes between LSA domains. Kernels that cross domains are templates
// over a class that meets `Network`. docs/network_protocol.md says how they use it.
//
// What a kernel may rely on, and nothing more:
//   * All windows have the same layout: source and target are offsets in the own window and in the peer's.
//   * put() is asynchronous, and puts land in any order, in any pieces. The source is read at any time until the put
//   has
//     landed, and must stay as it is. Before the call it must be visible to the whole system: the threads that wrote it
//     have met the caller at a barrier, and the caller has a system fence behind that.
//   * The signal of put_and_signal() lands after its own put. It says nothing of other puts (weak). signal() lands at
//     any time.
//   * A signal word belongs to a context: (context, signal) names one word on each rank. It starts at 0, grows by what
//     lands, and is never cleared.
//   * read_signal() is an acquire: what a put has brought is there once its signal is seen.
//   * Nothing here waits. Whoever uses it has no more puts and signals under way than NetworkShape::max_outstanding, of
//     each context and peer. Waits are the library's own: read_signal() in a loop with a deadline.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "layout/common/region.h"

namespace ep {

// Fixed when the kernels are loaded and the buffer is made.
struct NetworkShape {
  int num_contexts = 1;
  int num_signals = 1;      // of each context
  int max_outstanding = 1;  // puts and signals of a context to a peer that have not landed
};

// One thread calls each function. `peer`: a rank of the world, in another domain. `bytes`: positive; it and the offsets
// are multiples of 16.
template <class N>
concept Network = std::is_trivially_copyable_v<typename N::Args> &&
    std::constructible_from<N, const typename N::Args&> &&
    requires(const N& network, int peer, int context, int signal, Offset target, Offset source, uint64_t bytes,
             uint64_t add) {
  { network.put(peer, context, target, source, bytes) } -> std::same_as<void>;
  { network.put_and_signal(peer, context, target, source, bytes, signal, add) } -> std::same_as<void>;
  { network.signal(peer, context, signal, add) } -> std::same_as<void>;
  { network.read_signal(context, signal) } -> std::same_as<uint64_t>;
};

}  // namespace ep
