// The kernels of low-latency dispatch, of which there are two sets (kernel_set.cuh): dispatch.cu and
// masking_dispatch.cu.
#pragma once

#include "base/check.h"
#include "cuda/launch/launch_util.h"
#include "cuda/ll/dispatch.cuh"
#include "cuda/ll/dispatch/instances.cuh"

namespace ep {

// DeepEP's tools find kernels by "::dispatch" and "::combine" in their names.
namespace ll {
namespace {

template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
__global__ void __launch_bounds__(max_threads(kSteps), 1)
    dispatch(const __grid_constant__ KernelArgs<LlDispatchParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  const BlockPosition at = BlockPosition::own();
  ep::dispatch<kEncoding, kType, kSteps, kLayout>(args, at, shared);
}

template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
__global__ void __launch_bounds__(max_threads(kSteps), 1)
    dispatch_world(const KernelArgs<LlDispatchParams>* all, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  const BlockPosition at = BlockPosition::in_world(blocks);
  ep::dispatch<kEncoding, kType, kSteps, kLayout>(all[blockIdx.x / blocks], at, shared);
}

}  // namespace
}  // namespace ll

namespace {

void load_all() {
  const auto load = [](auto instance) {
    using I = decltype(instance);
    load_kernel(&ll::dispatch<I::encoding, I::type, I::steps, I::layout>, kMaxSharedBytes);
    load_kernel(&ll::dispatch_world<I::encoding, I::type, I::steps, I::layout>, kMaxSharedBytes);
  };
  for_all_instances(load);
}

void launch_one(const KernelArgs<LlDispatchParams>& args, void* stream) {
  with_instance(args.params, args.plan.steps, [&](auto instance) {
    using I = decltype(instance);
    launch_kernel(&ll::dispatch<I::encoding, I::type, I::steps, I::layout>, args.plan.blocks, args.plan.threads(),
                  static_cast<int>(args.geometry.bitmap.bytes), args.plan.pdl, stream, args);
  });
}

void launch_all(const KernelArgs<LlDispatchParams>* host_args, const KernelArgs<LlDispatchParams>* args, int num_ranks,
                void* stream) {
  const LlPlan& plan = host_args->plan;
  for (int r = 1; r < num_ranks; r++) {
    const OutputLayout first = host_args->params.output.layout, layout = host_args[r].params.output.layout;
    EP_CHECK(layout == first, "rank 0 wants layout ", name_of(first), ", rank ", r, " wants ", name_of(layout),
             ": in a world on one GPU they must be equal");
  }
  with_instance(host_args->params, plan.steps, [&](auto instance) {
    using I = decltype(instance);
    launch_kernel(&ll::dispatch_world<I::encoding, I::type, I::steps, I::layout>, plan.blocks * num_ranks,
                  plan.threads(), static_cast<int>(host_args->geometry.bitmap.bytes), false, stream, args, plan.blocks);
  });
}

}  // namespace
}  // namespace ep
