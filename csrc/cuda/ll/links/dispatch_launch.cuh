// The kernels of low-latency dispatch that cross domains, over the network EP_NETWORK (kernel_set.cuh).
#pragma once

#include "cuda/launch/launch_util.h"
#include "cuda/ll/dispatch.cuh"
#include "cuda/ll/dispatch/instances.cuh"
#include "cuda/ll/links/dispatch.cuh"

namespace ep {

namespace ll {  // as in dispatch_launch.cuh
namespace {

template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ void dispatch_block(const LlArgs<LlDispatchParams>& args, int block, char* shared) {
  const int front = args.rail.front_blocks();
  if (block < front) return dispatch_rail<kEncoding, kType, kSteps>(args, block);
  ep::dispatch<kEncoding, kType, kSteps, kLayout>(args, {block - front, args.plan.blocks}, shared);
}

template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
__global__ void __launch_bounds__(max_threads(kSteps), 1)
    dispatch_by_rail(const __grid_constant__ LlArgs<LlDispatchParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  dispatch_block<kEncoding, kType, kSteps, kLayout>(args, BlockPosition::own().block, shared);
}

}  // namespace
}  // namespace ll

namespace {

void load_rail_dispatch() {
  for_all_instances([](auto instance) {
    using I = decltype(instance);
    load_kernel(&ll::dispatch_by_rail<I::encoding, I::type, I::steps, I::layout>, kMaxSharedBytes);
  });
}

void launch_rail(const LlArgs<LlDispatchParams>& args, void* stream) {
  with_instance(args.params, args.plan.steps, [&](auto instance) {
    using I = decltype(instance);
    launch_kernel(&ll::dispatch_by_rail<I::encoding, I::type, I::steps, I::layout>,
                  args.rail.blocks() + args.plan.blocks, args.plan.threads(),
                  static_cast<int>(args.geometry.bitmap.bytes), args.plan.pdl, stream, args);
  });
}

}  // namespace
}  // namespace ep
