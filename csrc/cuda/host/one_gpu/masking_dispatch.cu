#define EP_MASKS_RANKS 1
#include "cuda/host/one_gpu/dispatch_world.cuh"

namespace ep {

void load_world_masking_dispatch() { load_all(); }

void launch_masking_world(const KernelArgs<LlDispatchParams>* host_args, const KernelArgs<LlDispatchParams>* args,
                          int num_ranks, void* stream) {
  launch_all(host_args, args, num_ranks, stream);
}

}  // namespace ep
