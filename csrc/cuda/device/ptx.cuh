// Every asm statement, one instruction each. The name contains order and scope; docs/memory_model.md says which
// accesses pair.
#pragma once

#include <cstdint>

// Shared memory of the block, declared in a function. (tests/gpu_emulator puts a file of its own in this one's place.)
#define EP_SHARED(Type, name) __shared__ Type name
#define EP_DYNAMIC_SHARED(Type, name) extern __shared__ __align__(128) Type name[]

namespace ep::ptx {

// A kernel's __grid_constant__ parameters, as other threads of the block may read them.
template <class T>
__device__ __forceinline__ const T& of_grid(const T& parameters) {
  return parameters;
}

// ---- Loads

__device__ __forceinline__ uint4 ld_nc(const void* p) {  // read-only for the whole kernel
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 ld_nc_8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t ld_nc_4(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t ld_nc_1(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u8 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 ld_relaxed_sys(const uint4* p) {  // each 32-bit word by itself
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 ld_relaxed_sys(const uint2* p) {
  uint2 v;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ld_relaxed_sys(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ ulonglong2 ld_relaxed_sys(const ulonglong2* p) {  // two words of 64 bits, each by itself
  ulonglong2 v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1},[%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t ld_relaxed_gpu(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// ---- Atomics

// Counts up, from `last` on to 0. (The compilers turn additions into one for the whole warp and wait for it at once,
// those written as asm and `inc` up to the largest number included.)
__device__ __forceinline__ uint32_t atom_inc_relaxed_gpu(uint32_t* p, uint32_t last) {
  uint32_t v;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0,[%1],%2;" : "=r"(v) : "l"(p), "r"(last) : "memory");
  return v;
}
// Adds 1 to what is below 2^32 - 2; the answer is waited for where it is used.
__device__ __forceinline__ uint32_t atom_count_relaxed_gpu(uint32_t* p) { return atom_inc_relaxed_gpu(p, ~1u); }

// ---- Stores

__device__ __forceinline__ void st(uint4* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void st(uint2* p, uint2 v) {
  asm volatile("st.global.v2.u32 [%0],{%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void st(uint32_t* p, uint32_t v) {
  asm volatile("st.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(uint4* p, uint4 v) {  // each 32-bit word by itself
  asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(uint2* p, uint2 v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0],{%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed_gpu(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed_gpu(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}

// ---- Shared memory, between warps of a block

using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint32_t ld_acquire_shared(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared.u32 %0,[%1];"
               : "=r"(v)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p)))
               : "memory");
  return v;
}
__device__ __forceinline__ void st_release_shared(uint32_t* p, uint32_t v) {
  asm volatile("st.release.cta.shared.u32 [%0],%1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))), "r"(v)
               : "memory");
}

__device__ __forceinline__ void st_shared(uint4* p, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void st_shared(uint32_t* p, uint32_t v) {
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))), "r"(v) : "memory");
}
__device__ __forceinline__ void st_shared(uint8_t* p, uint32_t v) {
  asm volatile("st.shared.u8 [%0],%1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))), "r"(v) : "memory");
}

// Words of rows that travel in band.
template <class Vector>
__device__ __forceinline__ void st_row(Vector* p, Vector v) {
#if defined(EP_WEAK_ROWS)
  st(p, v);
#else
  st_relaxed_sys(p, v);
#endif
}

// What the word was before. (The compiler waits for one atomic before it sends the next, if they stand under
// conditions.)
__device__ __forceinline__ uint32_t atom_or_relaxed_shared(uint32_t* p, uint32_t bits) {
  uint32_t before;
  asm volatile("atom.relaxed.cta.shared.or.b32 %0,[%1],%2;"
               : "=r"(before)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))), "r"(bits)
               : "memory");
  return before;
}

// ---- Copies into shared memory, weak and of the generic proxy: the thread that asked for them sees them when it has
// waited for their group

template <int kBytes>
__device__ __forceinline__ void copy_async(SharedAddress shared, const void* global) {
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4);
  if constexpr (kBytes == 16) {  // past L1
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(shared), "l"(global), "n"(kBytes) : "memory");
  }
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {  // until so many of this thread's groups, the newest, are left
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void ld_shared(SharedAddress p, uint4& v) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
}
__device__ __forceinline__ void ld_shared(SharedAddress p, uint2& v) {
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory");
}

__device__ __forceinline__ void ld_shared(SharedAddress p, uint32_t& v) {
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(p) : "memory");
}
__device__ __forceinline__ uint64_t ld_acquire_shared_u64(SharedAddress p) {
  uint64_t v;
  asm volatile("ld.acquire.cta.shared.u64 %0,[%1];" : "=l"(v) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_release_shared_u64(SharedAddress p, uint64_t v) {
  asm volatile("st.release.cta.shared.u64 [%0],%1;" ::"r"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void st_shared(SharedAddress p, uint32_t v) {
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(p), "r"(v) : "memory");
}

// ---- Bulk copies, by the engine beside the SM's warps: addresses and sizes are multiples of 16 bytes

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done != 0;
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {  // of this thread's groups: their sources may be written again
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait() {  // they have been written
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Of shared memory alone: it does not wait for stores to other GPUs.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- The rest

// Two halves at once; NaN loses against a number. (The intrinsics take an instruction more for each magnitude.)
__device__ __forceinline__ uint32_t max_magnitudes_bf16(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.xorsign.abs.bf16x2 %0,%1,%2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
// Two e2m1 codes in the low byte, the first in its low bits; NaN becomes 6.
__device__ __forceinline__ uint32_t cvt_e2m1x2(float first, float second) {
  uint32_t codes;
  asm("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %2, %1; cvt.u32.u8 %0, pair; }"
      : "=r"(codes)
      : "f"(first), "f"(second));
  return codes;
}
#endif

// Keeps a value in a register: the compiler would rather work it out again from constants, at 35 cycles each.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <class T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
// A value that all lanes have, in a register: ptxas would load a kernel's parameter again wherever it is used.
__device__ __forceinline__ uint32_t pinned(uint32_t value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ int pinned(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0,%1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ uint64_t global_timer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ uint64_t clock() {
  uint64_t t;
  asm volatile("mov.u64 %0,%clock64;" : "=l"(t)::"memory");
  return t;
}

}  // namespace ep::ptx
