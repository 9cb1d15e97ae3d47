// How units of work are handed out to warps, and the choices of an own token.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/device/ptx.cuh"
#include "layout/ht/routing.h"
#include "runtime/ht/params.h"

namespace ep {
inline namespace EP_KERNELS {

// A warp: the last of `count` segments that begins at or before a unit; starts[i] is the i-th's first unit.
__device__ __forceinline__ int segment_of(const int* starts, int count, int unit) {
  int segment = -1;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const bool begins = first + lane_id() < count && starts[first + lane_id()] <= unit;
    segment += __popc(__ballot_sync(~0u, begins));
  }
  return segment;
}

// A warp takes the next unit of a counter: prefetch() draws the ticket early, next() uses it late.
struct Tickets {
  uint32_t pending = 0;

  __device__ __forceinline__ void prefetch(uint32_t& counter) {
    if (lane_id() == 0) pending = ptx::atom_count_relaxed_gpu(&counter);
  }
  __device__ __forceinline__ int next() const { return static_cast<int>(__shfl_sync(~0u, pending, 0)); }
};

// A warp has finished `units`; returns the count before. Release of what its lanes did, acquire of the others'.
__device__ __forceinline__ uint32_t count_finished(uint32_t& counter, int units) {
  uint32_t before = 0;
  __syncwarp();
  if (lane_id() == 0) {
    __threadfence();
    before = atomicAdd(&counter, static_cast<uint32_t>(units));
    __threadfence();
  }
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();
  return before;
}

// For each of several numbers of so many bits the lanes that have the same. (An SM takes some 50 cycles for each
// __match_any_sync() of its warps; these are three instructions a bit.)
template <int kCount>
__device__ __forceinline__ void find_same_lanes(const int (&number)[kCount], int bits, unsigned (&same)[kCount]) {
#pragma unroll
  for (int q = 0; q < kCount; q++) same[q] = ~0u;
#pragma unroll 1
  for (int bit = 0; bit < bits; bit++) {
#pragma unroll
    for (int q = 0; q < kCount; q++) {
      const bool is_set = (number[q] >> bit & 1) != 0;
      const unsigned lanes = __ballot_sync(~0u, is_set);
      same[q] &= is_set ? lanes : ~lanes;
    }
  }
}

__device__ __forceinline__ unsigned find_same_lanes(int number, int bits) {
  const int numbers[] = {number};
  unsigned same[1];
  find_same_lanes(numbers, bits, same);
  return same[0];
}

// Choice `lane` of an own token, as the handle has it.
struct OwnChoice {
  int32_t id = -1, row = kNoRow, slot = kNoRow;

  __device__ __forceinline__ static OwnChoice load(const HtRoutes& own, int topk, int token) {
    if (lane_id() >= topk) return {};
    const int64_t entry = static_cast<int64_t>(token) * topk + lane_id();
    return {own.ids[entry], own.rows[entry], own.slots[entry]};
  }
};

// The owner of the expert of an own choice; -1: none, or its slot does not exist, in a handle that was changed. Between
// domains, for an owner in another one, what the role makes of it.
template <class Role>
__device__ __forceinline__ int owner_of(const Role& role, int32_t id, int32_t slot) {
  if (!role.p.shape.valid(id)) return -1;
  const int rank = role.geometry.by_local_experts.divide(id);
  if constexpr (kCrossesDomains) {
    if (!role.part.rail.is_near(rank)) return role.owner_elsewhere(rank);
  }
  return role.tables.flows.has_slot(rank, slot) ? rank : -1;
}

// Choices of a token, one a lane: the owner of the expert, and whether this lane is the first with that owner.
struct SameOwner {
  int rank = -1;
  unsigned lanes = 0;  // of the same rank
  bool leads = false;

  // The first of the group's rows that fits, `row` being this lane's; kNoRow if none does.
  __device__ __forceinline__ int32_t first_fitting(int32_t row) const {
    const unsigned fitting = __ballot_sync(~0u, row >= 0) & lanes;
    const int32_t first = __shfl_sync(~0u, row, fitting != 0 ? __ffs(static_cast<int>(fitting)) - 1 : lane_id());
    return fitting != 0 ? first : kNoRow;
  }
  template <class Role>
  __device__ __forceinline__ static SameOwner of(const Role& role, const OwnChoice& choice) {
    return among(owner_of(role, choice.id, choice.slot), role.geometry.rank_bits);
  }
  // `rank`: of this lane's choice.
  __device__ __forceinline__ static SameOwner among(int rank, int rank_bits) {
    SameOwner group;
    group.rank = rank;
    const bool is_there = group.rank >= 0;
    group.lanes = find_same_lanes(group.rank, rank_bits) & __ballot_sync(~0u, is_there);
    group.leads = is_there && __ffs(static_cast<int>(group.lanes)) - 1 == lane_id();
    return group;
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
