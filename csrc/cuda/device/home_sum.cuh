// What a token gets at home, in either mode: the biases and the terms that are added in between, rounded once. With a
// scale: the terms, times the scale, and then the biases. A lane has kCount numbers of each of kSteps steps, which lie
// 32 lanes' worths apart.
#pragma once

#include "cuda/device/numbers.cuh"

namespace ep {

template <class Params>
EP_HD bool has_bias(const Params& p) {
  return p.bias[0] != nullptr || p.bias[1] != nullptr;
}
template <class Params>
__device__ __forceinline__ bool begins_with_bias(const Params& p) {
  return has_bias(p) && p.options.scale == 1.0f;
}

// Where a lane's first numbers are, in the output and in the biases. `rest`: lanes' worths from there to the end of the
// row.
struct HomePlace {
  int64_t row;     // bytes
  int lane_index;  // in the row
  int rest;

  template <DType kOut, int kSteps, int kCount>
  __device__ __forceinline__ void add_bias(const void* bias, float (&sum)[kSteps][kCount]) const {
    const char* from = static_cast<const char*>(bias) + row + lane_index * Numbers<kOut, kCount>::kLaneBytes;
    if constexpr (kSteps > 1) from = ptx::opaque(from);  // else an address is worked out for each step
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      if (32 * s >= rest) continue;
      Numbers<kOut, kCount> numbers;
      numbers.load_nc(from, 32 * s);
      numbers.add_to(sum[s]);
    }
  }
};

template <DType kOut, int kSteps, int kCount, class Params>
__device__ __forceinline__ void add_biases(const Params& p, const HomePlace& place, float (&sum)[kSteps][kCount]) {
#pragma unroll 1
  for (const void* bias : p.bias) {
    if (bias != nullptr) place.add_bias<kOut>(bias, sum);
  }
}

// `nothing`: what the sum begins with before its first term. place_of(): asked where there is a bias.
template <DType kOut, int kSteps, int kCount, class Params, class PlaceOf>
__device__ __forceinline__ void begin_home_sum(const Params& p, const PlaceOf& place_of, float nothing,
                                               float (&sum)[kSteps][kCount]) {
  fill(sum, nothing);
  if (begins_with_bias(p)) add_biases<kOut>(p, place_of(), sum);
}

template <DType kOut, int kSteps, int kCount, class Params>
__device__ __forceinline__ void store_terms(const Params& p, const HomePlace& place,
                                            const float (&sum)[kSteps][kCount]) {
  store_steps<kOut>(static_cast<char*>(p.out) + place.row, place.lane_index, place.rest, sum);
}

template <DType kOut, int kSteps, int kCount, class Params>
__device__ __forceinline__ void store_home_sum(const Params& p, const HomePlace& place, float (&sum)[kSteps][kCount]) {
  if (p.options.scale != 1.0f) {
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
#pragma unroll
      for (int i = 0; i < kCount; i++) sum[s][i] = __fmul_rn(sum[s][i], p.options.scale);
    }
    add_biases<kOut>(p, place, sum);
  }
  store_terms<kOut>(p, place, sum);
}

}  // namespace ep
