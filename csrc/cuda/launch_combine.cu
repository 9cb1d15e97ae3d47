#include "base/check.h"
#include "cuda/launch_util.h"
#include "cuda/ll_combine.cuh"
#include "cuda/with_types.h"

namespace ep {
namespace {

constexpr int kMaxThreads = 640;
constexpr int kScalarThreads = 256;

template <DType kIn, DType kWire, DType kOut, bool kHome>
__global__ void __launch_bounds__(kMaxThreads, 1) ll_combine(const __grid_constant__ KernelArgs<LlCombineParams> args) {
  combine<kIn, kWire, kOut, kHome>(args, BlockPosition::own());
}

template <DType kIn, DType kWire, DType kOut, bool kHome>
__global__ void __launch_bounds__(kMaxThreads, 1) ll_combine_world(const KernelArgs<LlCombineParams>* all, int blocks) {
  combine<kIn, kWire, kOut, kHome>(all[blockIdx.x / blocks], BlockPosition::in_world(blocks));
}

__global__ void __launch_bounds__(kScalarThreads)
    ll_scalars_home(const __grid_constant__ KernelArgs<LlCombineWeightsParams> args) {
  scalars_home(args, BlockPosition::own());
}

__global__ void __launch_bounds__(kScalarThreads)
    ll_scalars_home_world(const KernelArgs<LlCombineWeightsParams>* all, int blocks) {
  scalars_home(all[blockIdx.x / blocks], BlockPosition::in_world(blocks));
}

// Calls body with the template instance for these parameters.
template <class Body>
void with_instance(const LlCombineParams& p, Body body) {
  with_types(p.dtype, p.wire_dtype, p.out_dtype, [&](auto types) {
    if (p.weighting == Weighting::kHome) return body(types, std::true_type{});
    return body(types, std::false_type{});
  });
}

}  // namespace

LlPlan plan_of(const LlCombineParams& p, int tokens, int num_sms) {
  return tuned("EP_PLAN_C", plan_combine({tokens, p.hidden, p.half != Half::kBoth}, num_sms));
}

LlPlan plan_of(const LlCombineWeightsParams&, int, int num_sms) {
  LlPlan plan;
  plan.blocks = num_sms;
  plan.warps = kScalarThreads / 32;
  return plan;
}

LlCombineGeometry geometry_of(const LlCombineParams& p, const LlPlan& plan) {
  const bool is_wide = p.dtype == DType::kF32 || p.wire_dtype == DType::kF32 || p.out_dtype == DType::kF32;
  return LlCombineGeometry::of(p, plan, is_wide ? 4 : 8);
}
NoGeometry geometry_of(const LlCombineWeightsParams&, const LlPlan&) { return {}; }

void check_served(const LlCombineParams& p) {
  EP_CHECK(p.wire_dtype == p.out_dtype || p.wire_dtype == DType::kF32, "a ", name_of(p.wire_dtype), " wire for ",
           name_of(p.out_dtype), " outputs: it must be of the same type or fp32");
  EP_CHECK(p.domain_size == p.shape.num_ranks, "domains of ", p.domain_size, " ranks in a world of ", p.shape.num_ranks,
           ": on CUDA the ranks of a group are one domain");
  EP_CHECK(p.shape.num_ranks <= 64, p.shape.num_ranks, " ranks, low-latency mode on CUDA serves 64");
}
void check_served(const LlCombineWeightsParams&) {}

void load_combine_kernels() {
  const auto load = [](auto types, auto home) {
    using T = decltype(types);
    load_kernel(&ll_combine<T::in, T::wire, T::out, home()>, 0);
    load_kernel(&ll_combine_world<T::in, T::wire, T::out, home()>, 0);
  };
  for_all_types([&](auto types) {
    load(types, std::false_type{});
    load(types, std::true_type{});
  });
  load_kernel(&ll_scalars_home, 0);
  load_kernel(&ll_scalars_home_world, 0);
}

std::vector<std::vector<uint64_t>> combine_stamps() { return read_stamps(); }

void launch(const KernelArgs<LlCombineParams>& args, void* stream) {
  with_instance(args.params, [&](auto types, auto home) {
    using T = decltype(types);
    launch_kernel(&ll_combine<T::in, T::wire, T::out, home()>, args.plan.blocks, args.plan.threads(), 0, args.plan.pdl,
                  stream, args);
  });
}

void launch(const KernelArgs<LlCombineWeightsParams>& args, void* stream) {
  launch_kernel(&ll_scalars_home, args.plan.blocks, args.plan.threads(), 0, args.plan.pdl, stream, args);
}

template <>
void launch_world(const KernelArgs<LlCombineParams>* host_args, const KernelArgs<LlCombineParams>* args, int num_ranks,
                  void* stream) {
  const LlPlan& plan = host_args->plan;
  for (int r = 1; r < num_ranks; r++) {
    EP_CHECK((host_args[r].params.weighting == Weighting::kHome) == (host_args->params.weighting == Weighting::kHome),
             "of ranks 0 and ", r, " one gives its weights at combine: in a world on one GPU all must, or none");
  }
  with_instance(host_args->params, [&](auto types, auto home) {
    using T = decltype(types);
    launch_kernel(&ll_combine_world<T::in, T::wire, T::out, home()>, plan.blocks * num_ranks, plan.threads(), 0, false,
                  stream, args, plan.blocks);
  });
}

template <>
void launch_world(const KernelArgs<LlCombineWeightsParams>* host_args, const KernelArgs<LlCombineWeightsParams>* args,
                  int num_ranks, void* stream) {
  const LlPlan& plan = host_args->plan;
  launch_kernel(&ll_scalars_home_world, plan.blocks * num_ranks, plan.threads(), 0, false, stream, args, plan.blocks);
}

}  // namespace ep
