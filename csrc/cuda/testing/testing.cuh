// Delay injection and planted bugs in kernels, in builds with NCCL_EP_LAB (EP_LAB). In others, and in kernels over GIN,
// every call folds to nothing. A file of kernels need only include this; base/testing.h names points and bugs.
#pragma once

#include "base/testing.h"
#include "cuda/device/kernel_set.cuh"
#include "cuda/testing/testing.h"
#include "layout/common/wire.h"

#if defined(EP_HAS_DELAYS)
#include "cuda/device/ptx.cuh"
#include "transport/device/check_cuda.h"
#endif

namespace ep {
inline namespace EP_KERNELS {

using testing::Bug;
using testing::Point;

// Where a warp is, for points at which the block has no context yet.
struct TestingOp {
  Kind kind;
  int rank;
  uint64_t epoch;
};

#if defined(EP_HAS_DELAYS)

static __constant__ GpuTesting gpu_testing;
[[maybe_unused]] static const bool has_gpu_testing_setter = add_gpu_testing_setter(
    [](const GpuTesting& testing) { EP_CUDA(cudaMemcpyToSymbol(gpu_testing, &testing, sizeof testing)); });

constexpr int kOnce = -1;

__device__ __forceinline__ uint64_t testing_hash(uint64_t seed, uint64_t value) {
  uint64_t x = seed + (value + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;  // splitmix64's finaliser
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Up to `most_us` microseconds in one of `odds` cases, in ns; else 0.
__device__ __forceinline__ uint64_t testing_stall(uint64_t draw, uint32_t odds, uint32_t most_us) {
  return draw % odds == 0 ? draw / odds % (most_us * 1000ull) : 0;
}

// A rank is late for longer than the others need for a call, now and then for 2 ms; a block or a warp for less. In
// every second call a rank is not late at all, so that it may overtake others.
static __device__ __noinline__ void stall(Point point, const TestingOp op, int number) {
  uint64_t draw = testing_hash(gpu_testing.seed, static_cast<uint64_t>(op.kind));
  draw = testing_hash(testing_hash(draw, op.epoch), op.rank);
  if (draw % 2 == 0) return;
  draw = testing_hash(draw, static_cast<uint64_t>(point));
  uint64_t ns = 0;
  if (number == kOnce) {
    ns = testing_stall(draw, 16, 300) + testing_stall(testing_hash(draw, ~0ull), 256, 2000);
    draw = testing_hash(draw, blockIdx.x);
    ns = max(ns, testing_stall(draw, 64, 100));
  }
  draw = testing_hash(testing_hash(draw, blockIdx.x * 32ull + (threadIdx.x >> 5)), number + 1);
  ns = max(ns, testing_stall(draw, 32, 20)) * gpu_testing.percent / 100;
  if (ns == 0) return;
  const uint64_t start = ptx::global_timer_ns();
  while (ptx::global_timer_ns() - start < ns) __nanosleep(200);
}

// A point that every warp of its role passes once a call: it may make a rank, a block or a warp late. With a `number`,
// that of a visit in a loop, a warp alone. A warp calls as a whole, or one lane of it.
template <class Call>  // with kind, rank and epoch
__device__ __forceinline__ void testing_point(Point point, const Call& op, int number = kOnce) {
  if (gpu_testing.seed != 0) stall(point, {op.kind, op.rank, op.epoch}, number);
}
// Where nothing of the operation is known, a warp may be late.
__device__ __forceinline__ void testing_point(Point point) {
  if (gpu_testing.seed != 0) stall(point, {Kind::kDispatch, 0, ptx::clock()}, 0);
}
__device__ __forceinline__ void testing_point_before_epoch(uint64_t last_epoch, Kind kind, int rank) {
  testing_point(Point::kBeforeEpoch, TestingOp{kind, rank, last_epoch + 1});
}
// `last_epoch`: read where a delay is drawn, and by then perhaps moved by another block's leader warp: a delay like
// another.
__device__ __forceinline__ void testing_point_before_op(const uint64_t& last_epoch, Kind kind, int rank) {
  testing_point(Point::kBeforeOp, TestingOp{kind, rank, ptx::ld_relaxed_gpu(&last_epoch) + 1});
}

// So many threads of a block pass it. For compute-sanitizer's racecheck, which sees barriers, and no acquires and
// releases.
__device__ __forceinline__ void testing_barrier(int id, int threads) {
  if (gpu_testing.barriers != 0) ptx::named_barrier(id, threads);
}

// Likewise: flags in shared memory are not used. A wait for a flag becomes a wait for what the flag stands for.
__device__ __forceinline__ bool testing_without_flags() { return gpu_testing.barriers != 0; }

// Polls of a wait that has an alternative: few in every second operation if others are late, so that it is taken.
__device__ __forceinline__ int testing_looks(int looks, uint64_t epoch) {
  return gpu_testing.seed != 0 && epoch % 2 == 1 ? 1 : looks;
}

__device__ __forceinline__ bool has_bug(Bug bug, Kind kind) {
  return (gpu_testing.bugs >> static_cast<int>(bug) & 1) != 0 && (gpu_testing.kinds >> static_cast<int>(kind) & 1) != 0;
}

#else

template <class Call>
__device__ __forceinline__ void testing_point(Point, const Call&, int = 0) {}
__device__ __forceinline__ void testing_point(Point) {}
__device__ __forceinline__ void testing_point_before_epoch(uint64_t, Kind, int) {}
__device__ __forceinline__ void testing_point_before_op(const uint64_t&, Kind, int) {}
__device__ __forceinline__ void testing_barrier(int, int) {}
__device__ __forceinline__ constexpr bool testing_without_flags() { return false; }
__device__ __forceinline__ int testing_looks(int looks, uint64_t) { return looks; }
__device__ __forceinline__ constexpr bool has_bug(Bug, Kind) { return false; }

#endif

}  // namespace EP_KERNELS
}  // namespace ep
