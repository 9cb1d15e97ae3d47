// Time line of a kernel, for builds with EP_STAMPS: when each warp of rank 0 passed each phase. Costs nothing otherwise.
#pragma once

#include <cstdint>

#include "cuda/ptx.cuh"

namespace ep {

enum class Stamp : int { kStart, kEpochKnown, kSent, kRoutingKnown, kOwnSum, kEnd, kCount };
constexpr int kStampWarps = 32;
constexpr int kStampBlocks = 160;

#if defined(EP_STAMPS)
extern __device__ uint64_t stamp_times[static_cast<int>(Stamp::kCount)][kStampBlocks][kStampWarps];

__device__ __forceinline__ void stamp(Stamp phase, int rank) {
  if (rank != 0 || (threadIdx.x & 31) != 0 || blockIdx.x >= kStampBlocks) return;
  stamp_times[static_cast<int>(phase)][blockIdx.x][threadIdx.x >> 5] = ptx::global_timer_ns();
}
#else
__device__ __forceinline__ void stamp(Stamp, int) {}
#endif

}  // namespace ep
