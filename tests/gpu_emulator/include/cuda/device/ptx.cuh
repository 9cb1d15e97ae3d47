// In place of csrc/cuda/device/ptx.cuh: the same instructions, by the emulator. Loads by which a thread may learn of
// another one let others run first.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstring>

#define EP_SHARED(Type, name)                                                       \
  static const int name##_number = ::ep::emulator::new_static_shared(sizeof(Type)); \
  Type& name = *static_cast<Type*>(::ep::emulator::static_shared(name##_number))
#define EP_DYNAMIC_SHARED(Type, name) Type* const name = reinterpret_cast<Type*>(::ep::emulator::dynamic_shared())

namespace ep::ptx {

// Here each thread has parameters of its own, which end with it: the block keeps a copy.
template <class T>
__device__ __forceinline__ const T& of_grid(const T& parameters) {
  EP_SHARED(T, kept);
  std::memcpy(static_cast<void*>(&kept), &parameters, sizeof(T));
  return kept;
}

// A GPU traps at an address that is no multiple of what is loaded or stored at once.
template <class T>
const T* checked(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) emulator::die("an access is not aligned to its size");
  return static_cast<const T*>(p);
}

// ---- Loads

template <class T>
T late_load(const T* p) {
  emulator::pause();
  T value;
  emulator::load(&value, checked<T>(p), sizeof value);
  return value;
}
// Words of a vector are loaded one by one.
template <class Word, class Vector>
Vector late_load_words(const Vector* p) {
  Word words[sizeof(Vector) / sizeof(Word)];
  const Word* from = reinterpret_cast<const Word*>(checked<Vector>(p));
  emulator::pause();
  for (Word& word : words) emulator::load(&word, from++, sizeof word);
  Vector value;
  std::memcpy(&value, words, sizeof value);
  return value;
}
inline uint4 ld_nc(const void* p) { return *checked<uint4>(p); }
inline uint2 ld_nc_8(const void* p) { return *checked<uint2>(p); }
inline uint32_t ld_nc_4(const void* p) { return *checked<uint32_t>(p); }
inline uint32_t ld_nc_1(const void* p) { return *static_cast<const uint8_t*>(p); }
inline uint4 ld_relaxed_sys(const uint4* p) { return late_load_words<uint32_t>(p); }
inline uint2 ld_relaxed_sys(const uint2* p) { return late_load_words<uint32_t>(p); }
inline uint32_t ld_relaxed_sys(const uint32_t* p) { return late_load(p); }
inline uint64_t ld_relaxed_sys(const uint64_t* p) { return late_load(p); }
inline ulonglong2 ld_relaxed_sys(const ulonglong2* p) { return late_load_words<uint64_t>(p); }
inline uint64_t ld_acquire_sys(const uint64_t* p) { return late_load(p); }
inline uint64_t ld_relaxed_gpu(const uint64_t* p) { return late_load(p); }
inline uint32_t ld_relaxed_gpu(const uint32_t* p) { return late_load(p); }
inline uint32_t ld_acquire_gpu(const uint32_t* p) { return late_load(p); }

// ---- Atomics

inline uint32_t atom_inc_relaxed_gpu(uint32_t* p, uint32_t last) {
  return emulator::update(p, [last](uint32_t before) { return before >= last ? 0 : before + 1; });
}
inline uint32_t atom_count_relaxed_gpu(uint32_t* p) { return atomicAdd(p, 1u); }
inline uint32_t atom_or_relaxed_shared(uint32_t* p, uint32_t bits) {
  return emulator::update(p, [bits](uint32_t before) { return before | bits; });
}

// ---- Stores

template <class Word, class Vector>
void late_store_words(Vector* p, const Vector& v) {
  Word words[sizeof v / sizeof(Word)];
  std::memcpy(words, &v, sizeof v);
  checked<Vector>(p);
  Word* to = reinterpret_cast<Word*>(p);
  for (const Word& word : words) emulator::store(to++, &word, sizeof word);
}
template <class Vector>
void weak_store_words(Vector* p, const Vector& v) {
  uint32_t words[sizeof v / sizeof(uint32_t)];
  std::memcpy(words, &v, sizeof v);
  checked<Vector>(p);
  uint32_t* to = reinterpret_cast<uint32_t*>(p);
  for (const uint32_t& word : words) emulator::store_weak(to++, &word, sizeof word);
}
inline void st(uint4* p, uint4 v) { weak_store_words(p, v); }
inline void st(uint2* p, uint2 v) { weak_store_words(p, v); }
inline void st(uint32_t* p, uint32_t v) { weak_store_words(p, v); }
inline void st_relaxed_sys(uint4* p, uint4 v) { late_store_words<uint32_t>(p, v); }
inline void st_relaxed_sys(uint2* p, uint2 v) { late_store_words<uint32_t>(p, v); }
inline void st_relaxed_sys(uint32_t* p, uint32_t v) { emulator::store(p, &v, sizeof v); }
inline void st_relaxed_sys(uint64_t* p, uint64_t v) { emulator::store(p, &v, sizeof v); }
inline void st_relaxed_gpu(uint64_t* p, uint64_t v) { emulator::store(p, &v, sizeof v); }
inline void st_relaxed_gpu(uint32_t* p, uint32_t v) { emulator::store(p, &v, sizeof v); }
template <class Vector>
void st_row(Vector* p, Vector v) {
  st_relaxed_sys(p, v);
}

// ---- Shared memory

using SharedAddress = char*;

inline SharedAddress shared_address(void* p) { return static_cast<char*>(p); }
inline uint32_t ld_acquire_shared(const uint32_t* p) {
  emulator::pause();
  return *p;
}
inline void st_release_shared(uint32_t* p, uint32_t v) { *p = v; }
inline uint64_t ld_acquire_shared_u64(SharedAddress p) {
  emulator::pause();
  return *reinterpret_cast<uint64_t*>(p);
}
inline void st_release_shared_u64(SharedAddress p, uint64_t v) { *reinterpret_cast<uint64_t*>(p) = v; }
inline void st_shared(uint4* p, uint4 v) { *const_cast<uint4*>(checked<uint4>(p)) = v; }
inline void st_shared(uint32_t* p, uint32_t v) { *p = v; }
inline void st_shared(uint8_t* p, uint32_t v) { *p = static_cast<uint8_t>(v); }

// ---- Copies into shared memory

template <int kBytes>
void copy_async(SharedAddress shared, const void* global) {
  emulator::copy_async(shared, global, kBytes);
}
inline void copy_async_commit() { emulator::copy_async_commit(); }
template <int kPending>
void copy_async_wait() {
  emulator::copy_async_wait(kPending);
}
template <class Vector>
void ld_shared(SharedAddress p, Vector& v) {
  std::memcpy(&v, p, sizeof v);
}
inline void st_shared(SharedAddress p, uint32_t v) { std::memcpy(p, &v, sizeof v); }

// ---- Bulk copies

inline void mbarrier_init(uint64_t* barrier, int arrivals) { emulator::mbarrier_init(barrier, arrivals); }
inline void mbarrier_expect(uint64_t* barrier, int bytes) { emulator::mbarrier_expect(barrier, bytes); }
inline bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  return emulator::mbarrier_has_passed(barrier, parity);
}
inline void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  emulator::bulk_load(shared, global, bytes, barrier);
}
inline void bulk_store(void* global, const void* shared, int bytes) { emulator::bulk_store(global, shared, bytes); }
inline void bulk_commit() { emulator::bulk_commit(); }
template <int kPending>
void bulk_wait_read() {
  emulator::bulk_wait(kPending, true);
}
template <int kPending>
void bulk_wait() {
  emulator::bulk_wait(kPending, false);
}
inline void fence_proxy_async() {}
inline void fence_proxy_async_shared() {}

// ---- The rest

template <class T>
T opaque(T value) {
  return value;
}
template <class T>
T pinned(T value) {
  return value;
}
inline void named_barrier(int id, int threads) { emulator::barrier(id, threads); }
inline void named_barrier_arrive(int id, int threads) { emulator::barrier_arrive(id, threads); }
inline void launch_dependents() {}
inline void wait_for_prerequisites() {}
// The same for all GPUs. Nobody waits by it, so that a stamp of a warp is no turn of the others.
inline uint64_t clock() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}
inline uint64_t global_timer_ns() {
  emulator::pause();
  return clock();
}

}  // namespace ep::ptx
