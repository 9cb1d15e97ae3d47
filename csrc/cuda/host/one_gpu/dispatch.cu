#define EP_ANNOUNCES_ROWS 1
#include "cuda/host/one_gpu/dispatch_world.cuh"

namespace ep {

void load_world_dispatch() { load_all(); }

void launch_world(const KernelArgs<LlDispatchParams>* host_args, const KernelArgs<LlDispatchParams>* args,
                  int num_ranks, void* stream) {
  if (host_args->peers.can_be_masked) return launch_masking_world(host_args, args, num_ranks, stream);
  launch_all(host_args, args, num_ranks, stream);
}

}  // namespace ep
