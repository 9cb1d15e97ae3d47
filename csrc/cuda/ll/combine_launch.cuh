// The kernels of low-latency combine, of which there are two sets (kernel_set.cuh): combine.cu and masking_combine.cu.
#pragma once

#include "base/check.h"
#include "cuda/launch/launch_util.h"
#include "cuda/launch/with_types.h"
#include "cuda/ll/combine.cuh"

namespace ep {

// Named as the kernels of dispatch are.
namespace ll {
namespace {

constexpr int kMaxThreads = 640;
constexpr int kScalarThreads = 256;

template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted, bool kSignalled>
__global__ void __launch_bounds__(kMaxThreads, 1) combine(const __grid_constant__ KernelArgs<LlCombineParams> args) {
  ep::combine<kIn, kWire, kOut, kHome, kUnweighted, kSignalled>(args, BlockPosition::own());
}

template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted, bool kSignalled>
__global__ void __launch_bounds__(kMaxThreads, 1) combine_world(const KernelArgs<LlCombineParams>* all, int blocks) {
  ep::combine<kIn, kWire, kOut, kHome, kUnweighted, kSignalled>(all[blockIdx.x / blocks],
                                                                BlockPosition::in_world(blocks));
}

__global__ void __launch_bounds__(kScalarThreads)
    scalars_home(const __grid_constant__ KernelArgs<LlCombineWeightsParams> args) {
  ep::scalars_home(args, BlockPosition::own());
}

__global__ void __launch_bounds__(kScalarThreads)
    scalars_home_world(const KernelArgs<LlCombineWeightsParams>* all, int blocks) {
  ep::scalars_home(all[blockIdx.x / blocks], BlockPosition::in_world(blocks));
}

}  // namespace
}  // namespace ll

namespace {

// Whether rows of these types can be sent as their signals come.
template <class T>
constexpr bool kAwaitsSignals = (!kMasksRanks && T::in == T::wire && T::in == T::out);

// Calls body with the template instance for these parameters.
template <class Body>
void with_instance(const LlCombineParams& p, bool is_signalled, Body body) {
  with_types(p.dtype, p.options.wire_dtype, p.options.out_dtype, [&](auto types) {
    if constexpr (kAwaitsSignals<decltype(types)>) {
      if (is_signalled) return body(types, std::true_type{}, std::true_type{}, std::true_type{});
    }
    EP_CHECK(!is_signalled, name_of(p.dtype), " rows for a ", name_of(p.options.wire_dtype),
             " wire: no kernel awaits signals");
    if (p.sends_unweighted) return body(types, std::true_type{}, std::true_type{}, std::false_type{});
    if (p.options.weighting == Weighting::kHome)
      return body(types, std::true_type{}, std::false_type{}, std::false_type{});
    return body(types, std::false_type{}, std::false_type{}, std::false_type{});
  });
}

void load_all() {
  const auto load = [](auto types, auto home, auto unweighted, auto signalled) {
    using T = decltype(types);
    load_kernel(&ll::combine<T::in, T::wire, T::out, home(), unweighted(), signalled()>, 0);
    load_kernel(&ll::combine_world<T::in, T::wire, T::out, home(), unweighted(), signalled()>, 0);
  };
  for_all_types([&](auto types) {
    load(types, std::false_type{}, std::false_type{}, std::false_type{});
    load(types, std::true_type{}, std::false_type{}, std::false_type{});
    load(types, std::true_type{}, std::true_type{}, std::false_type{});
    if constexpr (kAwaitsSignals<decltype(types)>) load(types, std::true_type{}, std::true_type{}, std::true_type{});
  });
  load_kernel(&ll::scalars_home, 0);
  load_kernel(&ll::scalars_home_world, 0);
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
