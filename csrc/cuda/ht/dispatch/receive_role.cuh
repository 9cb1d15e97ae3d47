// A warp of the second kernel of a dispatch that moves no rows between ranks.
#pragma once

#include "cuda/ht/dispatch/send_tables.cuh"

namespace ep {
inline namespace EP_KERNELS {

// A helper: a warp that is no worker. Some blocks have workers only.
struct ReceiveRole : SendRole {
  // A rank of a world on one GPU may have more blocks than it asked for.
  __device__ int helper_blocks() const { return at.num_blocks - plan.senders; }
  __device__ int warps() const { return helper_blocks() * plan.helpers(); }
  __device__ int helper() const { return warp - plan.workers_of(at.block); }  // of the block
  __device__ int receiver() const { return helper() * helper_blocks() + at.block - plan.senders; }
  __device__ bool has_copies() const { return geometry.has_copies(p.output.layout); }
  // The places of rows are in the handle's slots, not in the slots that others have written.
  __device__ bool keeps_slots() const { return has_expert_rows(p.output.layout) && !sends_metadata(p.variant); }
  // The last helper of a block waits for rows, and no other warp of it looks at their signals.
  __device__ bool watches() const { return helper() == plan.helpers() - 1; }
};

}  // namespace EP_KERNELS
}  // namespace ep
