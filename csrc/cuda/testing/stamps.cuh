// Time line of a kernel, for builds with NCCL_EP_LAB: when each warp of rank 0 passed each phase. Costs nothing
// otherwise.
#pragma once

#include <algorithm>

#include "cuda/device/ptx.cuh"
#include "cuda/testing/stamps.h"
#include "transport/device/check_cuda.h"

namespace ep {

enum class Stamp : int {
  kStart,
  kEpochKnown,
  kSent,
  kRoutingKnown,
  kOwnDone,
  kEnd,
  // High throughput between domains. What a warp makes for rail peers: rows in a dispatch, sums in a combine.
  kFirstPut,     // the first chunk that it completed is posted
  kLastPut,      // the last one
  kLastMade,     // the last row or sum lies in the staging; in a dispatch also a row of the own domain at its receiver
  kFirstUsed,    // the first row of a rail peer is handed out, or the first sum of one is being added up
  kLastArrival,  // the last chunk of a rail peer is seen to have come
  kCount
};

// Everything here is one per translation unit, hence one per kind of kernel.
#if defined(EP_LAB)
constexpr int kStamps = static_cast<int>(Stamp::kCount);
constexpr int kStampWarps = 132 * 32;  // of a rank
#if defined(EP_EMULATED_GPU)
constexpr int kStampRanks = 4;  // they share the process, hence this memory and the clock
#else
constexpr int kStampRanks = 1;
#endif
constexpr int kStampSlots = kStampRanks * kStampWarps;

// Clocks of the warp's SM, and the global time of the first and last stamp to translate them: a look at the global
// timer takes 200 ns.
static __device__ uint64_t stamp_clocks[kStamps][kStampSlots];
static __device__ uint64_t stamp_times[2][kStampSlots];

// -1: it has none.
static __device__ __forceinline__ int stamp_slot(int rank) {
  const int warp = blockIdx.x * 32 + (threadIdx.x >> 5);
  return rank < kStampRanks && warp < kStampWarps ? rank * kStampWarps + warp : -1;
}

// The last time that the warp passes it. All lanes, or the first.
static __device__ __forceinline__ void stamp(Stamp phase, int rank) {
  const int slot = stamp_slot(rank);
  if (slot < 0 || (threadIdx.x & 31) != 0) return;
  if (phase == Stamp::kStart) stamp_times[0][slot] = ptx::global_timer_ns();
  stamp_clocks[static_cast<int>(phase)][slot] = ptx::clock();
  if (phase == Stamp::kEnd) stamp_times[1][slot] = ptx::global_timer_ns();
}

// The same where any lane may be the one to pass; `is_first`: the first time counts, since stamps were taken.
static __device__ __forceinline__ void stamp_lane(Stamp phase, int rank, bool is_first = false) {
  const int slot = stamp_slot(rank);
  if (slot < 0) return;
  uint64_t& clock = stamp_clocks[static_cast<int>(phase)][slot];
  if (!is_first || clock == 0) clock = ptx::clock();
}

static inline TimeLine read_stamps() {
  static uint64_t clocks[kStamps][kStampSlots], zeros[kStamps][kStampSlots], times[2][kStampSlots];
  EP_CUDA(cudaMemcpyFromSymbol(clocks, stamp_clocks, sizeof clocks));
  EP_CUDA(cudaMemcpyFromSymbol(times, stamp_times, sizeof times));
  EP_CUDA(cudaMemcpyToSymbol(stamp_clocks, zeros, sizeof zeros));
  constexpr int kEnd = static_cast<int>(Stamp::kEnd);
  uint64_t start = ~0ull, elapsed = 0, ticks = 1;
  for (int slot = 0; slot < kStampSlots; slot++) {
    if (clocks[0][slot] == 0) continue;
    start = std::min(start, times[0][slot]);
    if (clocks[kEnd][slot] == 0) continue;
    elapsed += times[1][slot] - times[0][slot];
    ticks += clocks[kEnd][slot] - clocks[0][slot];
  }
  const double ns_per_tick = static_cast<double>(elapsed) / static_cast<double>(ticks);
  TimeLine phases(kStamps, std::vector<uint64_t>(kStampSlots, ~0ull));
  for (int phase = 0; phase < kStamps; phase++) {
    for (int slot = 0; slot < kStampSlots; slot++) {
      if (clocks[phase][slot] == 0) continue;
      const auto ticks_in = static_cast<double>(clocks[phase][slot] - clocks[0][slot]);
      phases[phase][slot] = times[0][slot] - start + static_cast<uint64_t>(ticks_in * ns_per_tick);
    }
  }
  return phases;
}
#else
__device__ __forceinline__ void stamp(Stamp, int) {}
__device__ __forceinline__ void stamp_lane(Stamp, int, bool = false) {}
static inline TimeLine read_stamps() { return {}; }
#endif

}  // namespace ep
