// How a dispatch tells of rows that lie at their place (runtime/common/arrivals.h).
#pragma once

#include "cuda/device/ptx.cuh"
#include "runtime/common/arrivals.h"

namespace ep {
inline namespace EP_KERNELS {

__device__ __forceinline__ int32_t expected_of(const Arrivals& arrivals) {
  return static_cast<int32_t>(
      ptx::ld_relaxed_gpu(reinterpret_cast<const uint32_t*>(arrivals.header(Arrivals::kExpected))));
}

// A thread, behind a fence that covers the block's rows and its entries of the tables.
static __device__ __noinline__ void announce_block(const Arrivals arrivals, const OutputShape output, int block,
                                                   bool is_empty) {
  const int32_t expected = expected_of(arrivals);
  const int all = arrivals.blocks_of(output);
  ptx::st_relaxed_gpu(reinterpret_cast<uint32_t*>(arrivals.entry(Arrivals::kWords, block)),
                      static_cast<uint32_t>(expected));
  // Low half: blocks with rows that have come; high half: blocks without. Whoever draws the last place clears it.
  auto* drawn = reinterpret_cast<unsigned*>(arrivals.header(Arrivals::kDrawn));
  const unsigned before = atomicAdd(drawn, is_empty ? 0x10000u : 1u);
  const int front = static_cast<int>(before & 0xFFFF), back = static_cast<int>(before >> 16);
  if (front + back + 1 == all) atomicExch(drawn, 0u);
  ptx::st_relaxed_gpu(reinterpret_cast<uint64_t*>(arrivals.order(is_empty ? all - 1 - back : front)),
                      static_cast<uint64_t>(Arrivals::told(expected, block)));
}

// A thread has stored `units` more of the block, or knows that -units are to come. Whoever brings the count to 0 has
// seen all of them: rows count up, and 0 is reached again only when what is to come was subtracted.
__device__ __forceinline__ void count_arrived(const Arrivals& arrivals, const OutputShape& output, int block,
                                              int units) {
  __threadfence();
  if (atomicAdd(arrivals.entry(Arrivals::kMissing, block), units) != -units) return;
  __threadfence();
  announce_block(arrivals, output, block, false);
}

// A warp has stored one unit of each lane's row; row < 0: of none. Nothing where no arrivals are asked for. Not inline,
// so that loops that move rows keep their registers.
template <class Params>
__device__ __noinline__ void count_rows_arrived(const Params& p, int32_t row) {
  if (p.arrivals.state == nullptr) return;
  __syncwarp();  // other lanes have stored parts of the row
  if (row >= 0) count_arrived(p.arrivals, p.output, p.arrivals.block_of(p.output, row), 1);
  __syncwarp();
}

// A lane knows how many rows an expert has, each of so many units. How many blocks have rows.
static __device__ __noinline__ int plan_expert(const Arrivals arrivals, const OutputShape output, int expert,
                                               int64_t start, int64_t next, int kept, int units) {
  arrivals.for_blocks_of(output, expert, start, next, kept, [&](const Arrivals::Block& block) {
    *arrivals.entry(Arrivals::kRows, block.number) = block.rows;
    *arrivals.entry(Arrivals::kFirst, block.number) = block.first;
    *arrivals.entry(Arrivals::kExperts, block.number) = block.rows > 0 ? expert : -1;
    if (block.rows > 0) {
      count_arrived(arrivals, output, block.number, -block.rows * units);
    } else {
      __threadfence();
      announce_block(arrivals, output, block.number, true);
    }
  });
  return ceil_div(kept, arrivals.rows_per_block);
}

// A thread, when all experts are planned; those who did it have called __threadfence() since, and it knows of them by a
// chain of atomics or barriers.
__device__ __forceinline__ void announce_plan(const Arrivals& arrivals, int blocks) {
  __threadfence();
  ptx::st_relaxed_gpu(reinterpret_cast<uint64_t*>(arrivals.plan()),
                      static_cast<uint64_t>(Arrivals::told(expected_of(arrivals), blocks)));
}

// Of a packed output: what no expert has.
static __device__ __noinline__ void plan_rest(const Arrivals arrivals, const OutputShape output, int64_t end) {
  if (output.layout == OutputLayout::kPacked) plan_expert(arrivals, output, -1, end, output.capacity, 0, 1);
}

// A thread: the operation gives up.
static __device__ __noinline__ void tell_failure(const Arrivals& arrivals) {
  if (arrivals.state == nullptr) return;
  ptx::st_relaxed_gpu(reinterpret_cast<uint32_t*>(arrivals.header(Arrivals::kFailed)),
                      static_cast<uint32_t>(expected_of(arrivals)));
}

}  // namespace EP_KERNELS
}  // namespace ep
