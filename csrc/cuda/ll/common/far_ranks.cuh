// Masks and heartbeats of ranks in other domains travel over the network, as signals with words of their own.
#pragma once

#include "cuda/ll/common/ll_args.cuh"

namespace ep {
inline namespace EP_KERNELS {

template <class Args>
__device__ __forceinline__ void note_network(OpContext& op, const Args& args) {
#if defined(EP_MASKS_RANKS) && defined(EP_NETWORK)
  if constexpr (requires { args.network; }) {
    const Args& kept = ptx::of_grid(args);
    op.rail = &kept.rail;
    op.network = &kept.network;
  }
#endif
}

#if defined(EP_MASKS_RANKS) && defined(EP_NETWORK)

__device__ __forceinline__ EP_NETWORK network_of(const OpContext& context) {
  return EP_NETWORK(*static_cast<const EP_NETWORK::Args*>(context.network));
}

__device__ inline bool FarRanks::has(const OpContext& context, int rank) { return context.rail->is_far(rank); }

__device__ inline void FarRanks::tell_mask(const OpContext& context, int peer) {
  if (atomicExch(&context.state->far_masks.is_told[peer], 1u) != 0) return;
  network_of(context).signal(peer, LlRail::kMaskContext, context.rail->mask_signal(context.rank), 1);
}

__device__ inline bool FarRanks::is_masked_by(const OpContext& context, int peer) {
  const uint64_t seen = network_of(context).read_signal(LlRail::kMaskContext, context.rail->mask_signal(peer));
  return seen > ptx::ld_relaxed_gpu(&context.state->far_masks.cleaned);
}

__device__ inline void FarRanks::send_heartbeat(const OpContext& context, int peer) {
  network_of(context).signal(peer, LlRail::kMaskContext, context.rail->heartbeat_signal(context.rank), 1);
}

__device__ inline uint64_t FarRanks::heartbeat(const OpContext& context, int peer) {
  return network_of(context).read_signal(LlRail::kMaskContext, context.rail->heartbeat_signal(peer));
}

#endif

}  // namespace EP_KERNELS
}  // namespace ep
