#include "cuda/launch/launch_util.h"
#include "cuda/ll/combine.cuh"
#include "cuda/ll/combine/instances.cuh"

namespace ep {

namespace ll {
namespace {

template <DType kType, bool kHome>
__global__ void __launch_bounds__(kMaxStreamThreads, 1)
    combine_streamed(const __grid_constant__ KernelArgs<LlCombineParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ep::combine_streamed<kType, kHome>(args, BlockPosition::own(), shared);
}

}  // namespace
}  // namespace ll

void load_streamed_combine_kernels() {
  for_all_streamed([](auto type, auto home) { load_kernel(&ll::combine_streamed<type(), home()>, kMaxSharedBytes); });
}

[[maybe_unused]] static const bool has_stamps = add_stamps_reader("ll_streamed_combine", &read_stamps);

void launch_streamed(const KernelArgs<LlCombineParams>& args, void* stream) {
  with_streamed(args.params, [&](auto type, auto home) {
    launch_kernel(&ll::combine_streamed<type(), home()>, args.plan.blocks, args.plan.threads(),
                  args.geometry.ring_bytes, args.plan.pdl, stream, args);
  });
}

}  // namespace ep
