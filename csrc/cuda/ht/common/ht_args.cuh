// The arguments of high throughput's kernels, and what ranks a rank reaches by stores. Those kernels that cross domains
// have some more.
#pragma once

#include "cuda/device/kernel_set.cuh"
#include "cuda/protocol/kernel_args.h"
#include "cuda/protocol/wait.cuh"
#if defined(EP_NETWORK)
#include EP_NETWORK_HEADER
#include "layout/ht/rail.h"
#endif

namespace ep {
inline namespace EP_KERNELS {

#if defined(EP_NETWORK)

static_assert(Network<EP_NETWORK>);

template <class Params>
struct HtArgs : KernelArgs<Params> {
  HtRail rail;
  EP_NETWORK::Args network;
};

// Of a role.
struct HtRailPart {
  const HtRail& rail;
  const EP_NETWORK::Args& network_args;

  template <class Args>
  __device__ __forceinline__ static HtRailPart of(const Args& args) {
    return {args.rail, args.network};
  }
  __device__ __forceinline__ EP_NETWORK network() const { return EP_NETWORK(network_args); }
};

#else

template <class Params>
using HtArgs = KernelArgs<Params>;

struct HtRailPart {
  template <class Args>
  __device__ __forceinline__ static HtRailPart of(const Args&) {
    return {};
  }
};

#endif

// The ranks of the own domain.
struct NearRanks {
  int first, size;

  __device__ __forceinline__ static NearRanks of(const LsaPeers& peers, int num_ranks) {
    if constexpr (kCrossesDomains) return {peers.first, peers.size};
    return {0, num_ranks};
  }
  __device__ __forceinline__ int end() const { return first + size; }
  __device__ __forceinline__ bool has(int rank) const {
    return !kCrossesDomains || static_cast<unsigned>(rank - first) < static_cast<unsigned>(size);
  }
};

// Between domains, the rows of a rank's rail peer for rank `first + i` of its domain are handed out by the rank itself:
// a flow that has a number, that of the i-th rank of the peer's domain. Flows of own rows have the receiver's number.
struct FlowEnds {
  int sender, receiver;

  __device__ __forceinline__ static FlowEnds of(const LsaPeers& peers, int flow) {
    if constexpr (kCrossesDomains) {
      const int size = peers.size, lsa = flow % size;
      return {flow - lsa + peers.rank - peers.first, peers.first + lsa};
    }
    return {peers.rank, flow};
  }
  // The number of the flow from the rank of this rank's place in `domain`.
  __device__ __forceinline__ static int number(const LsaPeers& peers, int domain, int receiver) {
    return kCrossesDomains ? domain * peers.size + receiver - peers.first : receiver;
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
