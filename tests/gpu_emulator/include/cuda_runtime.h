// What nvcc knows by itself, for the emulator: qualifiers, vectors, built-in variables and functions, launches.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../device.h"
#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__  // libstdc++ says it too, as an attribute
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

template <unsigned (*kRead)()>
struct BuiltInX {
  struct {
    operator unsigned() const { return kRead(); }
  } x;
};
inline constexpr BuiltInX<&ep::emulator::thread_index> threadIdx;
inline constexpr BuiltInX<&ep::emulator::block_index> blockIdx;
inline constexpr BuiltInX<&ep::emulator::block_dim> blockDim;
inline constexpr BuiltInX<&ep::emulator::grid_dim> gridDim;

// ---- Vectors

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct dim3 {
  unsigned x, y = 1, z = 1;
  explicit dim3(unsigned first) : x(first) {}
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// ---- Arithmetic

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
inline int __ffs(int value) { return value == 0 ? 0 : std::countr_zero(static_cast<unsigned>(value)) + 1; }
inline int __ffsll(long long value) {
  return value == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(value)) + 1;
}
inline int __popc(unsigned value) { return std::popcount(value); }
inline int __popcll(unsigned long long value) { return std::popcount(value); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t picked = 0;
  for (int i = 0; i < 4; i++) picked |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return picked;
}
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

// ---- A warp, a block

namespace ep::emulator {

template <class T>
uint64_t pack(T value) {
  static_assert(sizeof value <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T, class Combine>
T reduce(unsigned mask, T value, Combine combine) {
  const uint64_t* all = gather(WarpOp::kReduce, pack(value), mask);
  T result = unpack<T>(all[0]);
  for (int i = 1; i < 32; i++) result = combine(result, unpack<T>(all[i]));
  return result;
}
// An atomic: after the pause, and after what its block has stored there.
template <class T, class Next>
T update(T* target, Next next) {
  pause();
  T before;
  load(&before, target, sizeof before);
  *target = static_cast<T>(next(before));
  return before;
}

}  // namespace ep::emulator

inline void __syncwarp(unsigned mask = ~0u) { ep::emulator::gather(ep::emulator::WarpOp::kSync, 0, mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int lane = (ep::emulator::lane() & ~(width - 1)) | (from & (width - 1));
  return ep::emulator::unpack<T>(
      ep::emulator::gather(ep::emulator::WarpOp::kShuffle, ep::emulator::pack(value), mask)[lane]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta) {
  const int lane = ep::emulator::lane();
  return __shfl_sync(mask, value, lane >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, ep::emulator::lane() ^ bits);
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  const uint64_t* all = ep::emulator::gather(ep::emulator::WarpOp::kBallot, value, mask);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= static_cast<unsigned>(all[i] != 0) << i;
  return bits;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return ep::emulator::reduce(mask, value, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_or_sync(unsigned mask, T value) {
  return ep::emulator::reduce(mask, value, [](T a, T b) { return a | b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  return ep::emulator::reduce(mask, value, [](T a, T b) { return std::min(a, b); });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return ep::emulator::reduce(mask, value, [](T a, T b) { return std::max(a, b); });
}
inline void __syncthreads() { ep::emulator::barrier(0, -1); }
inline bool __syncthreads_or(bool value) { return ep::emulator::barrier(0, -1, value); }

// ---- Memory

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  return ep::emulator::update(p, [value](T before) { return before + value; });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> value) {
  return ep::emulator::update(p, [value](T before) { return std::max(before, value); });
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> value) {
  return ep::emulator::update(p, [value](T) { return value; });
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return ep::emulator::update(p, [=](T before) { return before == expected ? value : before; });
}
inline void __threadfence_block() { ep::emulator::pause(); }
inline void __threadfence() { ep::emulator::fence(); }
inline void __threadfence_system() { ep::emulator::fence(); }
inline void __nanosleep(unsigned) { ep::emulator::pause(); }

// ---- Launches

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim{1}, blockDim{1};
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes = 0;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };

template <class... Parameters, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Args&... args) {
  ep::emulator::launch(static_cast<int>(config->gridDim.x), static_cast<int>(config->blockDim.x),
                       config->dynamicSmemBytes, [&] { kernel(args...); });
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class T>
cudaError_t cudaMemcpyToSymbol(T& symbol, const void* source, size_t bytes) {
  std::memcpy(&symbol, source, bytes);
  return cudaSuccess;
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void* target, const T& symbol, size_t bytes) {
  std::memcpy(target, &symbol, bytes);
  return cudaSuccess;
}
