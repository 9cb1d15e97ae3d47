// Prefix sums of a warp.
#pragma once

#include <cstdint>

#include "cuda/device/lanes.cuh"

namespace ep {

// The sum over this lane and those before it, by add().
template <class T, class Add>
__device__ __forceinline__ T inclusive_sum(T value, const Add& add) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, step);
    if (lane_id() >= step) value = add(value, other);
  }
  return value;
}

// A warp: what comes before each of `count` values, into sums[0, count), and all of them, returned; no more than
// 2^31 - 1. value_of(i) may read sums[i].
template <class ValueOf>
__device__ __forceinline__ int exclusive_sums(int count, int* sums, const ValueOf& value_of) {
  const auto add = [](uint32_t a, uint32_t b) { return min(a + b, static_cast<uint32_t>(INT32_MAX)); };
  uint32_t next = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane_id();
    const uint32_t end = inclusive_sum(i < count ? static_cast<uint32_t>(value_of(i)) : 0u, add);
    const uint32_t before = __shfl_up_sync(~0u, end, 1);
    if (i < count) sums[i] = static_cast<int>(add(next, lane_id() > 0 ? before : 0));
    next = add(next, __shfl_sync(~0u, end, 31));
  }
  return static_cast<int>(next);
}

}  // namespace ep
