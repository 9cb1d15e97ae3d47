// Tables of a block in shared memory, and the rows between this rank and each other.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/ht/common/ht_args.cuh"
#include "runtime/ht/params.h"

namespace ep {
inline namespace EP_KERNELS {

// Shared memory, taken table by table.
struct SharedTables {
  char* next;

  template <class T>
  __device__ T* take(int count) {
    auto* table = reinterpret_cast<T*>(next);
    next += count * sizeof(T);
    return table;
  }
};

// A number from a handle, which is in device memory: if it was changed it must not reach beyond what there is.
__device__ __forceinline__ int within(int number, int64_t most) {
  return static_cast<int>(min(max(static_cast<int64_t>(number), int64_t{0}), most));
}

// Tokens of a rank with an expert of another.
template <class Params>
__device__ __forceinline__ int count_in_handle(const Params& p, int source, int receiver) {
  return within(p.handle.counts[source * p.shape.num_ranks + receiver], p.shape.max_tokens);
}

// Rows between this rank and each other, in shared memory.
struct Flows {
  int *to, *to_first;  // [R] rows that this rank sends, or hands out, by flows, and their first slot at the receiver
  int *from, *from_first;  // [R] rows here of each home, and the first slot

  __device__ static Flows of(SharedTables& tables, int ranks) {
    return {tables.take<int>(ranks), tables.take<int>(ranks), tables.take<int>(ranks), tables.take<int>(ranks)};
  }
  // A row of the flow may have it.
  __device__ __forceinline__ bool has_slot(int flow, int32_t slot) const {
    return static_cast<unsigned>(slot - to_first[flow]) < static_cast<unsigned>(to[flow]);
  }
  // A warp. count_of(source, receiver): tokens of a rank with an expert of another.
  template <class CountOf>
  __device__ __forceinline__ void fill(int ranks, const LsaPeers& peers, int other, const CountOf& count_of) const {
    const int rank = peers.rank;
    const FlowEnds ends = FlowEnds::of(peers, other);
    int before_to = 0, before_from = 0;
#pragma unroll 1
    for (int first = 0; first < ranks; first += 32) {
      const int source = first + lane_id();
      const int there = source < ranks ? count_of(source, ends.receiver) : 0;
      const int here = source < ranks ? count_of(source, rank) : 0;
      if (source == ends.sender) to[other] = there;
      if (source == other) from[other] = here;
      before_to += __reduce_add_sync(~0u, source < ends.sender ? there : 0);
      before_from += __reduce_add_sync(~0u, source < other ? here : 0);
    }
    if (lane_id() != 0) return;
    to_first[other] = before_to;
    from_first[other] = before_from;
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
