#define EP_MASKS_RANKS 1
#include "cuda/ll/combine_launch.cuh"

namespace ep {

void load_masking_combine_kernels() { load_all(); }

void launch_masking(const KernelArgs<LlCombineParams>& args, void* stream) { launch_one(args, stream); }
void launch_masking(const KernelArgs<LlCombineWeightsParams>& args, void* stream) { launch_one(args, stream); }

template <>
void launch_masking_world(const KernelArgs<LlCombineParams>* host_args, const KernelArgs<LlCombineParams>* args,
                          int num_ranks, void* stream) {
  launch_all(host_args, args, num_ranks, stream);
}

template <>
void launch_masking_world(const KernelArgs<LlCombineWeightsParams>* host_args,
                          const KernelArgs<LlCombineWeightsParams>* args, int num_ranks, void* stream) {
  launch_all(host_args, args, num_ranks, stream);
}

}  // namespace ep
