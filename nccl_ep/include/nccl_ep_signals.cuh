// For kernels of callers that run beside a dispatch or a combine: waits for blocks of rows in the order in which they
// arrive, and signals rows that a combine is to send. Plain CUDA (sm_70 or newer), nothing else is included.
//
// The memory is nccl_ep.Arrivals.state, of so many blocks. It holds what the dispatch says that was begun last, and is
// never cleared. All blocks of a kernel that waits must be able to run while the dispatch does.
#pragma once

#include <cuda_runtime.h>

namespace nccl_ep {

struct Arrivals {
  int* state;
  int blocks;

  static constexpr int kExpected = 0, kFailed = 1, kPlan = 6, kHeader = 16;
  static constexpr int kRows = 1, kFirst = 2, kExperts = 3, kTables = 5;

  __device__ int expected() const { return *static_cast<volatile const int*>(state + kExpected); }
  // Of a block that has arrived, and of all blocks of the output once the plan is known: rows, first row of x as
  // [rows, H], local expert (-1: no rows).
  __device__ int rows(int block) const { return entry(kRows, block); }
  __device__ int first(int block) const { return entry(kFirst, block); }
  __device__ int expert(int block) const { return entry(kExperts, block); }

  __device__ int entry(int table, int block) const {
    return *static_cast<volatile const int*>(state + kHeader + table * blocks + block);
  }
  __device__ const long long* order(int place) const {
    return reinterpret_cast<const long long*>(state + kHeader + (kTables * blocks + 1) / 2 * 2) + place;
  }
  __device__ const long long* plan() const { return reinterpret_cast<const long long*>(state + kPlan); }
};

__device__ __forceinline__ unsigned long long signals_clock_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// The low half of a word whose high half becomes `expected`; -1: the dispatch or a consumer has given up.
__device__ __forceinline__ int wait_word(const Arrivals& arrivals, const long long* word,
                                         unsigned long long timeout_ns) {
  const int expected = arrivals.expected();
  const unsigned long long start = signals_clock_ns();
  for (unsigned polls = 1;; polls++) {
    long long seen;
    asm volatile("ld.acquire.gpu.global.s64 %0,[%1];" : "=l"(seen) : "l"(word) : "memory");
    if (static_cast<int>(seen >> 32) == expected) return static_cast<int>(seen);
    if (polls % 128 != 0) continue;
    volatile int* failed = arrivals.state + Arrivals::kFailed;
    if (*failed == expected) return -1;
    if (signals_clock_ns() - start > timeout_ns) {
      *failed = expected;
      return -1;
    }
  }
}

// One thread waits until it is known how many blocks have rows, before the rows come, and returns that number; -1: the
// dispatch or a consumer has given up, this one where `timeout_ns` have passed. Behind a barrier with this thread the
// others may ask for rows(), first() and expert() of any block.
__device__ __forceinline__ int wait_plan(const Arrivals& arrivals, unsigned long long timeout_ns) {
  return wait_word(arrivals, arrivals.plan(), timeout_ns);
}

// One thread waits for the block at a place of the order of arrival, and returns it; -1: as wait_plan(). Other threads
// may read the rows behind a barrier with this thread. Rows are read by generic loads or cp.async; before a copy of the
// async proxy (TMA) stands `fence.proxy.async`.
__device__ __forceinline__ int wait_rows(const Arrivals& arrivals, int place, unsigned long long timeout_ns) {
  return wait_word(arrivals, arrivals.order(place), timeout_ns);
}

// One thread, behind a barrier with those that have written the rows: counts up their signal of
// combine_send(row_signals=...).
__device__ __forceinline__ void signal_rows(int* signal, int count = 1) {
  asm volatile("red.release.gpu.global.add.s32 [%0],%1;" ::"l"(signal), "r"(count) : "memory");
}

}  // namespace nccl_ep
