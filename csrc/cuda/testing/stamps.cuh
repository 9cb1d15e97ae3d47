// Time line of a kernel, for builds with NCCL_EP_STAMPS: when each warp of rank 0 passed each phase. Costs nothing
// otherwise.
#pragma once

#include <algorithm>

#include "cuda/device/ptx.cuh"
#include "cuda/testing/stamps.h"
#include "transport/device/check_cuda.h"

namespace ep {

enum class Stamp : int { kStart, kEpochKnown, kSent, kRoutingKnown, kOwnDone, kEnd, kCount };

// Everything here is one per translation unit, hence one per kind of kernel.
#if defined(EP_STAMPS)
constexpr int kStamps = static_cast<int>(Stamp::kCount);
constexpr int kStampWarps = 132 * 32;

// Clocks of the warp's SM, and the global time of the first and last stamp to translate them: a look at the global
// timer takes 200 ns.
static __device__ uint64_t stamp_clocks[kStamps][kStampWarps];
static __device__ uint64_t stamp_times[2][kStampWarps];

static __device__ __forceinline__ void stamp(Stamp phase, int rank) {
  const int warp = blockIdx.x * 32 + (threadIdx.x >> 5);
  if (rank != 0 || (threadIdx.x & 31) != 0 || warp >= kStampWarps) return;
  if (phase == Stamp::kStart) stamp_times[0][warp] = ptx::global_timer_ns();
  stamp_clocks[static_cast<int>(phase)][warp] = ptx::clock();
  if (phase == Stamp::kEnd) stamp_times[1][warp] = ptx::global_timer_ns();
}

static inline std::vector<std::vector<uint64_t>> read_stamps() {
  static uint64_t clocks[kStamps][kStampWarps], zeros[kStamps][kStampWarps], times[2][kStampWarps];
  EP_CUDA(cudaMemcpyFromSymbol(clocks, stamp_clocks, sizeof clocks));
  EP_CUDA(cudaMemcpyFromSymbol(times, stamp_times, sizeof times));
  EP_CUDA(cudaMemcpyToSymbol(stamp_clocks, zeros, sizeof zeros));
  constexpr int kEnd = static_cast<int>(Stamp::kEnd);
  uint64_t start = ~0ull, elapsed = 0, ticks = 1;
  for (int warp = 0; warp < kStampWarps; warp++) {
    if (clocks[0][warp] == 0) continue;
    start = std::min(start, times[0][warp]);
    if (clocks[kEnd][warp] == 0) continue;
    elapsed += times[1][warp] - times[0][warp];
    ticks += clocks[kEnd][warp] - clocks[0][warp];
  }
  const double ns_per_tick = static_cast<double>(elapsed) / static_cast<double>(ticks);
  std::vector<std::vector<uint64_t>> phases(kStamps, std::vector<uint64_t>(kStampWarps, ~0ull));
  for (int phase = 0; phase < kStamps; phase++) {
    for (int warp = 0; warp < kStampWarps; warp++) {
      if (clocks[phase][warp] == 0) continue;
      const auto ticks_in = static_cast<double>(clocks[phase][warp] - clocks[0][warp]);
      phases[phase][warp] = times[0][warp] - start + static_cast<uint64_t>(ticks_in * ns_per_tick);
    }
  }
  return phases;
}
#else
__device__ __forceinline__ void stamp(Stamp, int) {}
static inline std::vector<std::vector<uint64_t>> read_stamps() { return {}; }
#endif

}  // namespace ep
