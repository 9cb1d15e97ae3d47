// The kernels of low-latency combine, of which there are two sets (kernel_set.cuh): combine.cu and masking_combine.cu.
#pragma once

#include "cuda/launch/launch_util.h"
#include "cuda/ll/combine.cuh"
#include "cuda/ll/combine/instances.cuh"

namespace ep {

// Named as the kernels of dispatch are.
namespace ll {
namespace {

template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted, bool kSignalled>
__global__ void __launch_bounds__(kMaxThreads, 1) combine(const __grid_constant__ KernelArgs<LlCombineParams> args) {
  ep::combine<kIn, kWire, kOut, kHome, kUnweighted, kSignalled>(args, BlockPosition::own());
}

__global__ void __launch_bounds__(kScalarThreads)
    scalars_home(const __grid_constant__ KernelArgs<LlCombineWeightsParams> args) {
  ep::scalars_home(args, BlockPosition::own());
}

}  // namespace
}  // namespace ll

namespace {

void load_all() {
  for_all_instances([](auto types, auto home, auto unweighted, auto signalled) {
    using T = decltype(types);
    load_kernel(&ll::combine<T::in, T::wire, T::out, home(), unweighted(), signalled()>, 0);
  });
  load_kernel(&ll::scalars_home, 0);
}

void launch_one(const KernelArgs<LlCombineParams>& args, void* stream) {
  with_instance(args.params, args.params.signals.counters != nullptr,
                [&](auto types, auto home, auto unweighted, auto signalled) {
                  using T = decltype(types);
                  launch_kernel(&ll::combine<T::in, T::wire, T::out, home(), unweighted(), signalled()>,
                                args.plan.blocks, args.plan.threads(), 0, args.plan.pdl, stream, args);
                });
}

void launch_one(const KernelArgs<LlCombineWeightsParams>& args, void* stream) {
  launch_kernel(&ll::scalars_home, args.plan.blocks, args.plan.threads(), 0, args.plan.pdl, stream, args);
}

}  // namespace
}  // namespace ep
