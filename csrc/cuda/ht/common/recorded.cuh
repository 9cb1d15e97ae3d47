// What an operation's own kernels write for a recording. Without one they test a pointer.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/ht/common/op_context.cuh"
#include "runtime/common/recorded_words.h"

namespace ep {
inline namespace EP_KERNELS {

// What was before the operation on its stream is over.
__device__ __forceinline__ void record_begin(const RecordedWords& recorded, const HtBlock& block) {
  if (recorded.words == nullptr || !block.is_first() || block.thread() != 0) return;
  ptx::st_relaxed_sys(recorded.words + RecordedWords::kBegin, ptx::global_timer_ns());
}

// The first block calls, before record_end().
template <class CountOf>
__device__ __forceinline__ void record_counts(const RecordedWords& recorded, const HtBlock& block, int count,
                                              const CountOf& count_of) {
  if (recorded.words == nullptr) return;
#pragma unroll 1
  for (int i = block.thread(); i < count; i += block.threads()) {
    ptx::st_relaxed_sys(recorded.words + RecordedWords::kCounts + i, recorded.count(count_of(i)));
  }
}

// All threads of a block call, which have nothing else to do. Who sees the ends of all blocks sees the counts.
__device__ __forceinline__ void record_end(const RecordedWords& recorded, BlockPosition at) {
  if (recorded.words == nullptr) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (at.block == 0) ptx::st_relaxed_sys(recorded.words + RecordedWords::kBlocks, static_cast<uint64_t>(at.num_blocks));
  ptx::st_relaxed_sys(recorded.words + RecordedWords::kEnds + at.block, ptx::global_timer_ns());
}

}  // namespace EP_KERNELS
}  // namespace ep
