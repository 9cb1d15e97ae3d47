// The kernels of low-latency combine for all ranks of a world on one GPU, of which there are two sets (kernel_set.cuh):
// combine.cu and masking_combine.cu.
#pragma once

#include "cuda/host/one_gpu/launches.h"
#include "cuda/host/one_gpu/same_kernel.h"
#include "cuda/launch/launch_util.h"
#include "cuda/ll/combine.cuh"
#include "cuda/ll/combine/instances.cuh"

namespace ep {

namespace ll {
namespace {

template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted, bool kSignalled>
__global__ void __launch_bounds__(kMaxThreads, 1) combine_world(const KernelArgs<LlCombineParams>* all, int blocks) {
  ep::combine<kIn, kWire, kOut, kHome, kUnweighted, kSignalled>(all[blockIdx.x / blocks],
                                                                BlockPosition::in_world(blocks));
}

__global__ void __launch_bounds__(kScalarThreads)
    scalars_home_world(const KernelArgs<LlCombineWeightsParams>* all, int blocks) {
  ep::scalars_home(all[blockIdx.x / blocks], BlockPosition::in_world(blocks));
}

}  // namespace
}  // namespace ll

namespace {

[[maybe_unused]] const bool has_stamps = add_stamps_reader("ll_combine", &read_stamps);

void load_all() {
  for_all_instances([](auto types, auto home, auto unweighted, auto signalled) {
    using T = decltype(types);
    load_kernel(&ll::combine_world<T::in, T::wire, T::out, home(), unweighted(), signalled()>, 0);
  });
  load_kernel(&ll::scalars_home_world, 0);
}

void launch_all(const KernelArgs<LlCombineParams>* host_args, const KernelArgs<LlCombineParams>* args, int num_ranks,
                void* stream) {
  const LlPlan& plan = host_args->plan;
  bool is_signalled = false;  // of any rank; the rows of the others are there
  for (int r = 0; r < num_ranks; r++) is_signalled = is_signalled || host_args[r].params.signals.counters != nullptr;
  for (int r = 1; r < num_ranks; r++) check_same_kernel(host_args->params, host_args[r].params, r);
  with_instance(host_args->params, is_signalled, [&](auto types, auto home, auto unweighted, auto signalled) {
    using T = decltype(types);
    launch_kernel(&ll::combine_world<T::in, T::wire, T::out, home(), unweighted(), signalled()>,
                  plan.blocks * num_ranks, plan.threads(), 0, false, stream, args, plan.blocks);
  });
}

void launch_all(const KernelArgs<LlCombineWeightsParams>* host_args, const KernelArgs<LlCombineWeightsParams>* args,
                int num_ranks, void* stream) {
  const LlPlan& plan = host_args->plan;
  launch_kernel(&ll::scalars_home_world, plan.blocks * num_ranks, plan.threads(), 0, false, stream, args, plan.blocks);
}

}  // namespace
}  // namespace ep
