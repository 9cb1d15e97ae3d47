// The first kernel of a dispatch that routes.
#include "base/check.h"
#include "cuda/ht/route.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace ht {
namespace {

constexpr int kRouteThreads = 1024;

template <bool kExpertRows>
__global__ void __launch_bounds__(kRouteThreads, 1)
    dispatch_route(const __grid_constant__ KernelArgs<HtRouteParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_route<kExpertRows>(args, BlockPosition::own(), shared);
}

}  // namespace
}  // namespace ht

HtPlan plan_of(const HtRouteParams& p, int, const Arch& arch) {
  const Arch own = p.options.num_sms > 0 ? arch : arch.with_sms(default_ht_sms({}, p.shape.num_ranks, arch));
  return tuned("EP_PLAN_HR", plan_ht_route(own));
}

HtRouteGeometry geometry_of(const HtRouteParams& p, const HtPlan& plan) { return HtRouteGeometry::of(p, plan); }

void load_ht_route_kernels() {
  for (auto* kernel : {&ht::dispatch_route<false>, &ht::dispatch_route<true>}) {
    // As the kernel that follows: an SM that changes its split of memory waits until it is empty.
    EP_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
    load_kernel(kernel, kMaxSharedBytes);
  }
}

[[maybe_unused]] static const bool has_stamps = add_stamps_reader("ht_route", &read_stamps);

void launch(const KernelArgs<HtRouteParams>& args, void* stream) {
  const bool expert_rows = has_expert_rows(args.params.output.layout);
  launch_kernel(expert_rows ? &ht::dispatch_route<true> : &ht::dispatch_route<false>, args.plan.blocks,
                args.plan.threads(), args.geometry.bytes, args.plan.pdl, stream, args);
}

}  // namespace ep
