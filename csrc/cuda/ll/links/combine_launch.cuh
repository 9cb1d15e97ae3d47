// The kernels of low-latency combine that cross domains, over the network EP_NETWORK (kernel_set.cuh).
#pragma once

#include "cuda/device/with_types.h"
#include "cuda/launch/launch_util.h"
#include "cuda/ll/combine.cuh"
#include "cuda/ll/links/combine.cuh"
#include "cuda/ll/links/scalars.cuh"

namespace ep {
namespace {

constexpr int kMaxThreads = 640;
constexpr int kScalarThreads = 256;

}  // namespace

namespace ll {
namespace {

template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted>
__device__ __forceinline__ void combine_block(const LlArgs<LlCombineParams>& args, int own) {
  const LlRail& rail = args.rail;
  if (own < rail.front_blocks()) return combine_front<kHome, kUnweighted>(args, own);
  int block = own - rail.front_blocks();
  if (block >= rail.sums_at) {
    block -= rail.sum_blocks;
    if (block < rail.sums_at) {
      return combine_sums<kIn, kWire, kOut, kHome, kUnweighted>(args, block + rail.sum_blocks - rail.sums_at);
    }
  }
  ep::combine<kIn, kWire, kOut, kHome, kUnweighted>(args, {block, args.plan.blocks});
}

template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted>
__global__ void __launch_bounds__(kMaxThreads, 1)
    combine_by_rail(const __grid_constant__ LlArgs<LlCombineParams> args) {
  combine_block<kIn, kWire, kOut, kHome, kUnweighted>(args, BlockPosition::own().block);
}

}  // namespace
}  // namespace ll

namespace {

__device__ __forceinline__ void scalars_block(const LlArgs<LlCombineWeightsParams>& args, int block) {
  const int front = args.rail.front_blocks();
  if (block < front) return scalars_front(args, block);
  scalars_home_by_rail(args, {block - front, args.plan.blocks});
}

__global__ void __launch_bounds__(kScalarThreads)
    rail_scalars_home(const __grid_constant__ LlArgs<LlCombineWeightsParams> args) {
  scalars_block(args, BlockPosition::own().block);
}

template <class Body>
void with_instance(const LlCombineParams& p, Body body) {
  with_types(p.dtype, p.options.wire_dtype, p.options.out_dtype, [&](auto types) {
    if (p.sends_unweighted) return body(types, std::true_type{}, std::true_type{});
    if (p.options.weighting == Weighting::kHome) return body(types, std::true_type{}, std::false_type{});
    return body(types, std::false_type{}, std::false_type{});
  });
}

void load_rail_combine() {
  for_all_types([](auto types) {
    using T = decltype(types);
    load_kernel(&ll::combine_by_rail<T::in, T::wire, T::out, false, false>, 0);
    load_kernel(&ll::combine_by_rail<T::in, T::wire, T::out, true, false>, 0);
    load_kernel(&ll::combine_by_rail<T::in, T::wire, T::out, true, true>, 0);
  });
  load_kernel(&rail_scalars_home, 0);
}

void launch_rail(const LlArgs<LlCombineParams>& args, void* stream) {
  with_instance(args.params, [&](auto types, auto home, auto unweighted) {
    using T = decltype(types);
    launch_kernel(&ll::combine_by_rail<T::in, T::wire, T::out, home(), unweighted()>,
                  args.rail.blocks() + args.plan.blocks, args.plan.threads(), 0, args.plan.pdl, stream, args);
  });
}

void launch_rail(const LlArgs<LlCombineWeightsParams>& args, void* stream) {
  launch_kernel(&rail_scalars_home, args.rail.blocks() + args.plan.blocks, args.plan.threads(), 0, args.plan.pdl,
                stream, args);
}

}  // namespace
}  // namespace ep
