// The kernels of low-latency dispatch for all ranks of a world on one GPU, of which there are two sets
// (kernel_set.cuh): dispatch.cu and masking_dispatch.cu.
#pragma once

#include "base/check.h"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/launch/launch_util.h"
#include "cuda/ll/dispatch.cuh"
#include "cuda/ll/dispatch/instances.cuh"

namespace ep {

namespace ll {
namespace {

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

[[maybe_unused]] const bool has_stamps = add_stamps_reader("ll_dispatch", &read_stamps);

void load_all() {
  for_all_instances([](auto instance) {
    using I = decltype(instance);
    load_kernel(&ll::dispatch_world<I::encoding, I::type, I::steps, I::layout>, kMaxSharedBytes);
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
