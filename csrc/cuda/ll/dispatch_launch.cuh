// The kernels of low-latency dispatch, of which there are two sets (kernel_set.cuh): dispatch.cu and
// masking_dispatch.cu.
#pragma once

#include "base/check.h"
#include "cuda/launch/launch_util.h"
#include "cuda/ll/dispatch.cuh"

namespace ep {

// DeepEP's tools find kernels by "::dispatch" and "::combine" in their names.
namespace ll {
namespace {

// As in plan_dispatch(): pieces of four steps need more registers a thread.
constexpr int max_threads(int steps) { return steps == 2 ? 640 : 512; }

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

template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
struct Instance {
  static constexpr Encoding encoding = kEncoding;
  static constexpr DType type = kType;
  static constexpr int steps = kSteps;
  static constexpr OutputLayout layout = kLayout;
};

// Calls body with the template instance for these parameters.
template <OutputLayout kLayout, class Body>
void with_encoding(const LlDispatchParams& p, int steps, Body body) {
  constexpr OutputLayout k = kLayout;
  if (p.quant != Quant::kNone && p.dtype == DType::kBF16) return body(Instance<Encoding::kFp8, DType::kBF16, 2, k>{});
  if (p.quant != Quant::kNone) return body(Instance<Encoding::kFp8, DType::kF16, 2, k>{});
  if (p.row.is_keyed) return body(Instance<Encoding::kKeyed, DType::kBF16, 2, k>{});
  if (steps == 2) return body(Instance<Encoding::kFloat, DType::kBF16, 2, k>{});
  return body(Instance<Encoding::kFloat, DType::kBF16, 4, k>{});
}
template <class Body>
void with_instance(const LlDispatchParams& p, int steps, Body body) {
  switch (p.output.layout) {
    case OutputLayout::kExpertMajor:
      return with_encoding<OutputLayout::kExpertMajor>(p, steps, body);
    case OutputLayout::kPacked:
      return with_encoding<OutputLayout::kPacked>(p, steps, body);
    case OutputLayout::kRankMajor:
      return with_encoding<OutputLayout::kRankMajor>(p, steps, body);
    case OutputLayout::kFlat:
      return with_encoding<OutputLayout::kFlat>(p, steps, body);
  }
}

void load_all() {
  const auto load = [](auto instance) {
    using I = decltype(instance);
    load_kernel(&ll::dispatch<I::encoding, I::type, I::steps, I::layout>, kMaxSharedBytes);
    load_kernel(&ll::dispatch_world<I::encoding, I::type, I::steps, I::layout>, kMaxSharedBytes);
  };
  constexpr OutputLayout kLayouts[] = {OutputLayout::kExpertMajor, OutputLayout::kPacked, OutputLayout::kRankMajor,
                                       OutputLayout::kFlat};
  LlDispatchParams p;
  for (int steps : {2, 4}) {
    for (bool is_keyed : {false, true}) {
      for (DType dtype : {DType::kBF16, DType::kF16}) {
        for (Quant quant : {Quant::kNone, Quant::kFp8}) {
          for (OutputLayout layout : kLayouts) {
            p.output.layout = layout;
            p.row.is_keyed = is_keyed;
            p.dtype = dtype;
            p.quant = quant;
            with_instance(p, steps, load);
          }
        }
      }
    }
  }
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
