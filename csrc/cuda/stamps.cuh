// Time line of a kernel, for builds with EP_STAMPS: when each warp of rank 0 passed each phase. Costs nothing
// otherwise.
#pragma once

#include <algorithm>

#include "cuda/ptx.cuh"
#include "cuda/stamps.h"
#include "transport/check_cuda.h"

namespace ep {

enum class Stamp : int { kStart, kEpochKnown, kSent, kRoutingKnown, kOwnDone, kEnd, kCount };

// Everything here is one per translation unit, hence one per kind of kernel.
#if defined(EP_STAMPS)
constexpr int kStamps = static_cast<int>(Stamp::kCount);
constexpr int kStampWarps = 132 * 32;

static __device__ uint64_t stamp_times[kStamps][kStampWarps];

__device__ __forceinline__ void stamp(Stamp phase, int rank) {
  const int warp = blockIdx.x * 32 + (threadIdx.x >> 5);
  if (rank != 0 || (threadIdx.x & 31) != 0 || warp >= kStampWarps) return;
  stamp_times[static_cast<int>(phase)][warp] = ptx::global_timer_ns();
}

static inline std::vector<std::vector<uint64_t>> read_stamps() {
  static uint64_t times[kStamps][kStampWarps], zeros[kStamps][kStampWarps];
  EP_CUDA(cudaMemcpyFromSymbol(times, stamp_times, sizeof times));
  EP_CUDA(cudaMemcpyToSymbol(stamp_times, zeros, sizeof zeros));
  uint64_t start = ~0ull;
  for (uint64_t t : times[0]) start = t != 0 ? std::min(start, t) : start;
  std::vector<std::vector<uint64_t>> phases(kStamps, std::vector<uint64_t>(kStampWarps, ~0ull));
  for (int phase = 0; phase < kStamps; phase++) {
    for (int warp = 0; warp < kStampWarps; warp++) {
      if (times[phase][warp] != 0) phases[phase][warp] = times[phase][warp] - start;
    }
  }
  return phases;
}
#else
__device__ __forceinline__ void stamp(Stamp, int) {}
static inline std::vector<std::vector<uint64_t>> read_stamps() { return {}; }
#endif

}  // namespace ep
