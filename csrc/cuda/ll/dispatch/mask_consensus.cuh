// Which ranks a dispatch leaves out, with masks. The places of rows follow from the routing of all sources, so all
// blocks must leave out the same sources, and none that another block heard in the last moment. Each block waits for
// the routing of all sources. The first block to finish decides for all which are left out.
#pragma once

#include "cuda/protocol/wait.cuh"

namespace ep {
inline namespace EP_KERNELS {

// The part of a block's first receiving warp.
class MaskConsensus {
 public:
  // Before the block waits for routing, and before a barrier.
  __device__ __forceinline__ void open(const OpContext& context) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int source = lane_id() + 32 * i;
      if (source < context.state->masks.num_ranks) notices_[i] = notice_of(context, source);
    }
    if (lane_id() < 2) {
      before_ = ptx::ld_relaxed_gpu(&context.state->masks.consensus[lane_id()]);
      context.left_out[lane_id()] = context.masked[lane_id()];
    }
    __syncwarp();  // a barrier of the block takes a warp as a whole
  }

  // After the block has waited for routing and a barrier, and before another. If no source was late or had masked this
  // rank, and the first block has found the same, that is all. Else the block reads the routing again, of all sources
  // that the first block has heard.
  __device__ __forceinline__ void settle(const OpContext& context) const {
    const uint32_t told[2] = {who_notified(context, 0), who_notified(context, 1)};
    if (lane_id() < 2) agree(context, context.left_out[lane_id()] | told[lane_id()]);
    __syncwarp();
  }

 private:
  // The word by which a source tells that it has masked this rank.
  __device__ __forceinline__ static uint64_t notice_of(const OpContext& context, int source) {
    if constexpr (kMasksFarRanks) {
      if (is_far(context, source)) return FarRanks::is_masked_by(context, source) ? tagged(1, context.tag) : 0;
    }
    return ptx::ld_relaxed_sys(context.state->masks.mask_word(context.kind, context.bank, source));
  }
  // One lane, of 32 ranks.
  __device__ __forceinline__ void agree(const OpContext& context, uint32_t mine) const {
    uint64_t said = before_;
    if (!is_tagged(said, context.tag)) {
      auto* word = reinterpret_cast<unsigned long long*>(&context.state->masks.consensus[lane_id()]);
      said = atomicCAS(word, before_, tagged(mine, context.tag));
      if (said == before_) said = tagged(mine, context.tag);
    }
    const auto theirs = static_cast<uint32_t>(said);
    context.listens_again[lane_id()] = (mine | theirs) ^ context.masked[lane_id()];
    context.left_out[lane_id()] = theirs;
  }

  // Of ranks 32 i and following, those that had masked this one before the block waited, in this operation or in a
  // later one: they may have sent all that this rank needs, and get nothing from it.
  __device__ __forceinline__ uint32_t who_notified(const OpContext& context, int i) const {
    const auto tag = static_cast<uint32_t>(notices_[i] >> 32);
    const bool has_notified = static_cast<uint32_t>(notices_[i]) != 0 && is_not_before(tag, context.tag);
    if (has_notified) ptx::st_relaxed_gpu(&context.state->masks.is_masked[lane_id() + 32 * i], 1);
    return __ballot_sync(~0u, has_notified);
  }

  uint64_t notices_[2] = {0, 0};
  uint64_t before_ = 0;
};

__device__ __forceinline__ bool has_left_out(const OpContext& context, int source) {
  return (context.left_out[source >> 5] >> (source & 31) & 1) != 0;
}
// A wait for its routing is over.
__device__ __forceinline__ void leave_out(const OpContext& context, int source) {
  if (kMasksRanks) ptx::atom_or_relaxed_shared(&context.left_out[source >> 5], 1u << (source & 31));
}

}  // namespace EP_KERNELS
}  // namespace ep
