#define EP_MASKS_RANKS 1
#include "cuda/ll/dispatch_launch.cuh"

namespace ep {

void load_masking_dispatch_kernels() { load_all(); }

void launch_masking(const KernelArgs<LlDispatchParams>& args, void* stream) { launch_one(args, stream); }

template <>
void launch_masking_world(const KernelArgs<LlDispatchParams>* host_args, const KernelArgs<LlDispatchParams>* args,
                          int num_ranks, void* stream) {
  launch_all(host_args, args, num_ranks, stream);
}

}  // namespace ep
