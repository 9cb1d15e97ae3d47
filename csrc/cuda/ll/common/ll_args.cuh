// The arguments of low latency's kernels. Those that cross domains have some more.
#pragma once

#include "cuda/device/kernel_set.cuh"
#include "cuda/protocol/kernel_args.h"
#include "cuda/protocol/wait.cuh"
#if defined(EP_NETWORK)
#include EP_NETWORK_HEADER
#include "layout/ll/rail.h"
#endif

namespace ep {
inline namespace EP_KERNELS {

#if defined(EP_NETWORK)

static_assert(Network<EP_NETWORK>);

template <class Params>
struct LlArgs : KernelArgs<Params> {
  LlRail rail;
  EP_NETWORK::Args network;
};

// Of a role.
struct RailPart {
  const LlRail* rail;
  const EP_NETWORK::Args* network;

  template <class Args>
  __device__ __forceinline__ static RailPart of(const Args& args) {
    return {&args.rail, &args.network};
  }
  __device__ __forceinline__ int link_of(int rank) const { return rail->link_of(rank); }
  __device__ __forceinline__ bool sends_inside() const { return rail->adds_rows; }
  __device__ __forceinline__ bool places_rows() const { return rail->places_rows; }
  __device__ __forceinline__ bool comes_by_link(int rank) const { return places_rows() && rail->is_far(rank); }
};

#else

template <class Params>
using LlArgs = KernelArgs<Params>;

struct RailPart {
  template <class Args>
  __device__ __forceinline__ static RailPart of(const Args&) {
    return {};
  }
  __device__ __forceinline__ int link_of(int) const { return 0; }
  __device__ __forceinline__ static bool sends_inside() { return false; }
  __device__ __forceinline__ static bool places_rows() { return false; }
  __device__ __forceinline__ static bool comes_by_link(int) { return false; }
};

#endif

// What combine() and scalars_home() do besides, over several domains (links/combine.cuh, links/scalars.cuh). One warp
// waits until nothing of the call is under way to this rank.
template <class Args>
__device__ void await_rest(const WarpContext& op, const Args& args);

}  // namespace EP_KERNELS
}  // namespace ep
