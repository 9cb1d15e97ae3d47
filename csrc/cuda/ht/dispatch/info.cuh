// The info tensor of a high-throughput dispatch, stored by one warp: of the routing kernel if no rows follow, else of
// the kernel that sends rows, because that one waits for the routing kernel. If the operation fails the tensor is zeros
// in the end: a warp that has given up a wait clears it, and the warp that stores it checks afterwards whether one has.
// Each fences in between (sequentially consistent), so that one of them sees the other.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/protocol/wait.cuh"
#include "layout/common/outputs.h"

namespace ep {
inline namespace EP_KERNELS {

// The buffer is known to have failed.
__device__ __forceinline__ void clear_info(const OutputShape& output, int32_t* info) {
  __threadfence();
  for (int i = lane_id(); i < output.info_size(); i += 32) info[i] = 0;
}

// demand_of(bin): rows that want it. start_of(bin): its first row, where bins have no parts of their own; packed: also
// of the bin behind the last.
template <class DemandOf, class StartOf>
__device__ __forceinline__ void store_info(const OutputShape& output, int32_t* info, const OpContext& op,
                                           const DemandOf& demand_of, const StartOf& start_of) {
  int total = 0, dropped = 0;
#pragma unroll 1
  for (int bin = lane_id(); bin < output.bins(); bin += 32) {
    const int demand = demand_of(bin);
    const auto kept = static_cast<int>(output.kept(output.has_parts() ? 0 : start_of(bin), demand));
    info[bin] = kept;
    info[output.demand_at() + bin] = demand;
    total += kept;
    dropped += demand - kept;
  }
#pragma unroll 1
  for (int i = lane_id(); i < output.num_offsets(); i += 32) {
    info[output.offsets_at() + i] = static_cast<int>(min(static_cast<int64_t>(start_of(i)), output.capacity));
  }
  total = __reduce_add_sync(~0u, total);
  dropped = __reduce_add_sync(~0u, dropped);
  if (lane_id() == 0) {
    info[output.overflow_at()] = dropped;
    info[output.total_at()] = total;
    if (dropped > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&op.state->diagnostics.dropped_rows),
                static_cast<unsigned long long>(dropped));
    }
  }
  __threadfence();
  __syncwarp();
  if (__any_sync(~0u, op.has_failed())) clear_info(output, info);
}

}  // namespace EP_KERNELS
}  // namespace ep
