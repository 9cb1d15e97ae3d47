#include "cuda/host/one_gpu/combine_world.cuh"

namespace ep {

void load_world_combine() {
  load_all();
  load_world_streamed_combine();
}

void launch_world(const KernelArgs<LlCombineParams>* host_args, const KernelArgs<LlCombineParams>* args, int num_ranks,
                  void* stream) {
  if (host_args->plan.streams) return launch_streamed_world(host_args, args, num_ranks, stream);
  if (host_args->peers.can_be_masked) return launch_masking_world(host_args, args, num_ranks, stream);
  launch_all(host_args, args, num_ranks, stream);
}

void launch_world(const KernelArgs<LlCombineWeightsParams>* host_args, const KernelArgs<LlCombineWeightsParams>* args,
                  int num_ranks, void* stream) {
  if (host_args->peers.can_be_masked) return launch_masking_world(host_args, args, num_ranks, stream);
  launch_all(host_args, args, num_ranks, stream);
}

}  // namespace ep
