#define EP_ANNOUNCES_ROWS 1
#include "cuda/ll/dispatch_launch.cuh"

namespace ep {

void load_announcing_dispatch_kernels() { load_all(); }

void launch_announcing(const KernelArgs<LlDispatchParams>& args, void* stream) { launch_one(args, stream); }

}  // namespace ep
