#define EP_MASKS_RANKS 1
#include "cuda/ll/combine_launch.cuh"

namespace ep {

void load_masking_combine_kernels() { load_all(); }

void launch_masking(const KernelArgs<LlCombineParams>& args, void* stream) { launch_one(args, stream); }
void launch_masking(const KernelArgs<LlCombineWeightsParams>& args, void* stream) { launch_one(args, stream); }

}  // namespace ep
