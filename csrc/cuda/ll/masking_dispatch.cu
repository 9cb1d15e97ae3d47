#define EP_MASKS_RANKS 1
#include "cuda/ll/dispatch_launch.cuh"

namespace ep {

void load_masking_dispatch_kernels() { load_all(); }

void launch_masking(const KernelArgs<LlDispatchParams>& args, void* stream) { launch_one(args, stream); }

}  // namespace ep
