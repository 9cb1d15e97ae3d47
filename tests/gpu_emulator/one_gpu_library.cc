// Emulated GPUs have the kernels for a world on one GPU in the extension itself.
#include "cuda/host/one_gpu_world.h"

namespace ep {

std::shared_ptr<OneGpuWorld> join_one_gpu_world(Bootstrap& bootstrap, uint64_t window_bytes, double timeout_seconds,
                                                bool masks_ranks) {
  return nccl_ep_one_gpu_table()->join(bootstrap, window_bytes, timeout_seconds, masks_ranks);
}

}  // namespace ep
