// Number formats in registers. Every rounding is written out: no contraction, no fast math (docs/semantics.md).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/device/ptx.cuh"
#include "layout/common/dtype.h"
#include "layout/common/small_blocks.h"

namespace ep {

// Two 16-bit numbers of a word as floats, and back (to nearest even).
template <DType kType>
__device__ __forceinline__ float2 unpack2(uint32_t word) {
  if constexpr (kType == DType::kBF16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}
template <DType kType>
__device__ __forceinline__ uint32_t pack2(float a, float b) {
  if constexpr (kType == DType::kBF16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// The larger magnitude of each pair of halves; NaN is passed over, signs mean nothing.
template <DType kType>
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b) {
  if constexpr (kType == DType::kBF16) {
    return ptx::max_magnitudes_bf16(a, b);
  } else {
    const __half2 larger =
        __hmax2(__habs2(*reinterpret_cast<const __half2*>(&a)), __habs2(*reinterpret_cast<const __half2*>(&b)));
    return *reinterpret_cast<const uint32_t*>(&larger);
  }
}

// Four floats to four e4m3 bytes, saturating.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3)) |
         static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3)) << 16;
}

// The larger of each pair of halves, as integers.
__device__ __forceinline__ uint32_t max_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

// Eight floats to eight e2m1 codes, the first in the low bits; saturating, NaN becomes a zero (small_blocks.h:
// e2m1_of).
__device__ __forceinline__ uint32_t pack_e2m1(const float (&values)[8]) {
  uint32_t word = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const auto is_there = [](float value) { return value == value ? value : 0.0f; };  // the instruction makes 6 of NaN
    word |= ptx::cvt_e2m1x2(is_there(values[2 * i]), is_there(values[2 * i + 1])) << (8 * i);
  }
#else
#pragma unroll
  for (int i = 0; i < 8; i++) word |= e2m1_of(__float_as_uint(values[i])) << (4 * i);
#endif
  return word;
}

// Two e4m3 bytes, exactly.
__device__ __forceinline__ float2 unpack2_e4m3(uint32_t bytes) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), __NV_E4M3)));
}

}  // namespace ep
