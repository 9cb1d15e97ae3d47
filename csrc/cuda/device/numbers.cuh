// What a lane holds of a row that is added up: numbers of bf16, fp16 or fp32, in words as they travel.
#pragma once

#include <type_traits>

#include "cuda/device/convert.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/row_piece.cuh"

namespace ep {

// Four floats where anything is fp32, else eight 16-bit numbers: at most 16 bytes.
template <DType kIn, DType kWire, DType kOut>
constexpr int kLaneElements = kIn == DType::kF32 || kWire == DType::kF32 || kOut == DType::kF32 ? 4 : 8;

template <DType kType, int kCount>
struct Numbers {
  static constexpr int kWords = kType == DType::kF32 ? kCount : kCount / 2, kLaneBytes = 4 * kWords;
  uint32_t words[kWords];

  __device__ __forceinline__ void load_nc(const void* row, int64_t lane_index) {
    const char* p = static_cast<const char*>(row) + lane_index * (kWords * 4);
    if constexpr (kWords == 4) {
      set(ptx::ld_nc(p));
    } else {
      set(ptx::ld_nc_8(p));
    }
  }
  __device__ __forceinline__ void load_relaxed_sys(const char* row, int lane_index) {
    const char* p = row + lane_index * (kWords * 4);
    if constexpr (kWords == 4) {
      set(ptx::ld_relaxed_sys(reinterpret_cast<const uint4*>(p)));
    } else {
      set(ptx::ld_relaxed_sys(reinterpret_cast<const uint2*>(p)));
    }
  }
  __device__ __forceinline__ void load_shared(ptx::SharedAddress p) {
    std::conditional_t<kWords == 4, uint4, uint2> v;
    ptx::ld_shared(p, v);
    set(v);
  }
  __device__ __forceinline__ void store_remote(char* row, int lane_index) const {
    char* p = row + lane_index * (kWords * 4);
    if constexpr (kWords == 4) {
      ptx::st_row(reinterpret_cast<uint4*>(p), make_uint4(words[0], words[1], words[2], words[3]));
    } else {
      ptx::st_row(reinterpret_cast<uint2*>(p), make_uint2(words[0], words[1]));
    }
  }
  __device__ __forceinline__ void store(void* row, int64_t lane_index) const {
    char* p = static_cast<char*>(row) + lane_index * (kWords * 4);
    if constexpr (kWords == 4) {
      ptx::st(reinterpret_cast<uint4*>(p), make_uint4(words[0], words[1], words[2], words[3]));
    } else {
      ptx::st(reinterpret_cast<uint2*>(p), make_uint2(words[0], words[1]));
    }
  }
  __device__ __forceinline__ bool have_arrived() const {
    bool ok = true;
#pragma unroll
    for (int i = 0; i < kWords; i++) ok = ok && words[i] != kAbsent;
    return ok;
  }
  __device__ __forceinline__ void fill(uint32_t word) {
#pragma unroll
    for (int i = 0; i < kWords; i++) words[i] = word;
  }
  __device__ __forceinline__ void escape() {
#pragma unroll
    for (int i = 0; i < kWords; i++) words[i] = escaped(words[i]);
  }
  __device__ __forceinline__ float2 pair(int i) const {  // numbers 2i and 2i + 1
    if constexpr (kType == DType::kF32) {
      return make_float2(__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1]));
    } else {
      return unpack2<kType>(words[i]);
    }
  }
  __device__ __forceinline__ void from(const float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
      if constexpr (kType == DType::kF32) {
        words[2 * i] = __float_as_uint(values[2 * i]);
        words[2 * i + 1] = __float_as_uint(values[2 * i + 1]);
      } else {
        words[i] = pack2<kType>(values[2 * i], values[2 * i + 1]);
      }
    }
  }
  __device__ __forceinline__ void add_to(float (&sum)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
      const float2 f = pair(i);
      sum[2 * i] = __fadd_rn(sum[2 * i], f.x);
      sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], f.y);
    }
  }
  __device__ __forceinline__ void add_product_to(float (&sum)[kCount], float weight) const {
#pragma unroll
    for (int i = 0; i < kCount / 2; i++) {
      const float2 f = pair(i);
      sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(weight, f.x));
      sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(weight, f.y));
    }
  }

 private:
  __device__ __forceinline__ void set(uint4 v) {
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  }
  __device__ __forceinline__ void set(uint2 v) {
    words[0] = v.x;
    words[1] = v.y;
  }
};

// A sum starts as -0: adding the first term to it leaves that term's bits, +0 and -0 included.
constexpr float kNothingYet = -0.0f;

template <DType kTo, DType kFrom, int kCount>
__device__ __forceinline__ Numbers<kTo, kCount> converted(const Numbers<kFrom, kCount>& numbers) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) values[i] = kNothingYet;
  numbers.add_to(values);
  Numbers<kTo, kCount> result;
  result.from(values);
  return result;
}

// To a row. A lane has kCount numbers of each of kSteps steps, which lie 32 lanes' worths apart. `rest`: lanes' worths
// from this lane's first to the end of the row.
template <DType kTo, int kSteps, int kCount>
__device__ __forceinline__ void store_steps(char* row, int lane_index, int rest, const float (&sums)[kSteps][kCount]) {
  char* out = row + lane_index * Numbers<kTo, kCount>::kLaneBytes;
  if constexpr (kSteps > 1) out = ptx::opaque(out);  // else an address is worked out for each step
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    Numbers<kTo, kCount> numbers;
    numbers.from(sums[s]);
    if (32 * s < rest) numbers.store(out, 32 * s);
  }
}

template <int kSteps, int kCount>
__device__ __forceinline__ void fill(float (&sums)[kSteps][kCount], float value) {
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
#pragma unroll
    for (int i = 0; i < kCount; i++) sums[s][i] = value;
  }
}

}  // namespace ep
