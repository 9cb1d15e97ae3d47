// The kernels of low-latency dispatch, of which there are three sets (kernel_set.cuh): dispatch.cu,
// announcing_dispatch.cu and masking_dispatch.cu.
#pragma once

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

}  // namespace
}  // namespace ll

namespace {

// Rows of ranks do not announce themselves.
template <class Instance>
constexpr bool kIsServed = !kAnnouncesRows || kMasksRanks || has_expert_rows(Instance::layout);

void load_all() {
  for_all_instances([](auto instance) {
    using I = decltype(instance);
    if constexpr (kIsServed<I>) load_kernel(&ll::dispatch<I::encoding, I::type, I::steps, I::layout>, kMaxSharedBytes);
  });
}

void launch_one(const KernelArgs<LlDispatchParams>& args, void* stream) {
  with_instance(args.params, args.plan.steps, [&](auto instance) {
    using I = decltype(instance);
    if constexpr (kIsServed<I>) {
      launch_kernel(&ll::dispatch<I::encoding, I::type, I::steps, I::layout>, args.plan.blocks, args.plan.threads(),
                    static_cast<int>(args.geometry.bitmap.bytes), args.plan.pdl, stream, args);
    }
  });
}

}  // namespace
}  // namespace ep
