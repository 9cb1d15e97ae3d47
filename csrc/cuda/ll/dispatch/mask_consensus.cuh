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
    const int num_ranks = context.state->masks.num_ranks;
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int source = lane_id() + 32 * i;
      if (source < num_ranks) notices_[i] = notice_of(context, source);
    }
#pragma unroll 1
    for (int i = kAhead; i < RankMask::words_of(num_ranks); i++) {
      const int source = lane_id() + 32 * i;
      note_told(context, i, source < num_ranks ? notice_of(context, source) : 0);
    }
#pragma unroll 1
    for (int word = lane_id(); word < RankMask::words_of(num_ranks); word += 32) {
      context.left_out[word] = context.masked[word];
    }
    if (lane_id() < RankMask::words_of(num_ranks)) before_ = said_of(context, lane_id());
    if (lane_id() == 0) context.listens_again = 0;
    __syncwarp();  // a barrier of the block takes a warp as a whole
  }

  // After the block has waited for routing and a barrier, and before another. If no source was late or had masked this
  // rank, and the first block has found the same, that is all. Else the block reads the routing again, of all sources
  // that the first block has heard.
  __device__ __forceinline__ void settle(const OpContext& context) const {
    const int words = RankMask::words_of(context.state->masks.num_ranks);
#pragma unroll
    for (int i = 0; i < kAhead; i++) note_told(context, i, notices_[i]);
    __syncwarp();
    uint32_t differs = 0;
#pragma unroll 1
    for (int word = lane_id(); word < words; word += 32) {
      differs |= agree(context, word, word < 32 ? before_ : said_of(context, word));
    }
    if (differs != 0) context.listens_again = 1;
    __syncwarp();
  }

 private:
  static constexpr int kAhead = 2;  // words of ranks whose notices are loaded while the block waits for routing

  // The word by which a source tells that it has masked this rank.
  __device__ __forceinline__ static uint64_t notice_of(const OpContext& context, int source) {
    if constexpr (kMasksFarRanks) {
      if (is_far(context, source)) return FarRanks::is_masked_by(context, source) ? tagged(1, context.tag) : 0;
    }
    return ptx::ld_relaxed_sys(context.state->masks.mask_word(context.kind, context.bank, source));
  }
  // What the first block has said of a word of ranks, in this operation or in one before.
  __device__ __forceinline__ static uint64_t said_of(const OpContext& context, int index) {
    return ptx::ld_relaxed_gpu(&context.state->masks.consensus[index]);
  }
  // One lane, of a word of ranks. Not 0: the block must read the routing again.
  __device__ __forceinline__ static uint32_t agree(const OpContext& context, int index, uint64_t before) {
    const uint32_t mine = context.left_out[index] | context.has_told[index];
    uint64_t said = before;
    if (!is_tagged(said, context.tag)) {
      auto* word = reinterpret_cast<unsigned long long*>(&context.state->masks.consensus[index]);
      said = atomicCAS(word, before, tagged(mine, context.tag));
      if (said == before) said = tagged(mine, context.tag);
    }
    const auto theirs = static_cast<uint32_t>(said);
    context.left_out[index] = theirs;
    return Masks::differences(mine, theirs, context.masked[index]);
  }

  // Of ranks 32 i and following, those that had masked this one before the block waited, in this operation or in a
  // later one: they may have sent all that this rank needs, and get nothing from it. A warp calls.
  __device__ __forceinline__ static void note_told(const OpContext& context, int i, uint64_t notice) {
    const auto tag = static_cast<uint32_t>(notice >> 32);
    const bool has_notified = static_cast<uint32_t>(notice) != 0 && is_not_before(tag, context.tag);
    if (has_notified) ptx::st_relaxed_gpu(&context.state->masks.is_masked[lane_id() + 32 * i], Masks::kMasked);
    const uint32_t told = __ballot_sync(~0u, has_notified);
    if (lane_id() == 0) context.has_told[i] = told;
  }

  uint64_t notices_[kAhead] = {};
  uint64_t before_ = 0;  // said_of() the lane's word, loaded while the block waits for routing
};

__device__ __forceinline__ bool has_left_out(const OpContext& context, int source) {
  return (context.left_out[RankMask::word_of(source)] & RankMask::bit_of(source)) != 0;
}
// A wait for its routing is over.
__device__ __forceinline__ void leave_out(const OpContext& context, int source) {
  if (kMasksRanks) ptx::atom_or_relaxed_shared(&context.left_out[RankMask::word_of(source)], RankMask::bit_of(source));
}

}  // namespace EP_KERNELS
}  // namespace ep
