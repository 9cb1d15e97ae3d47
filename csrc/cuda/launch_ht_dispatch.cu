#include "base/check.h"
#include "cuda/ht_receive.cuh"
#include "cuda/launch_util.h"

namespace ep {
namespace {

constexpr int kManyThreads = 32 * kHtManyWarps, kFewThreads = 32 * kHtFewWarps;

template <bool kExpertRows, bool kQuant, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    ht_dispatch_rows(const __grid_constant__ KernelArgs<HtDispatchParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_dispatch<kExpertRows, kQuant>(args, BlockPosition::own(), shared);
}

// First come the blocks of all ranks that route, `routers` each, then the others.
template <bool kQuant>
__global__ void __launch_bounds__(kManyThreads, 1)
    ht_dispatch_rows_world(const KernelArgs<HtDispatchParams>* all, int num_ranks, int routers, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  const int first_other = num_ranks * routers, index = static_cast<int>(blockIdx.x) - first_other;
  if (index >= 0) {
    const BlockPosition at{index % blocks, blocks}, of_all{routers + at.block, routers + blocks};
    return ht_send<kQuant>(all[index / blocks], at, of_all, shared);
  }
  const auto& args = all[blockIdx.x / routers];  // ranks may have different layouts
  const BlockPosition at = BlockPosition::in_world(routers), of_all{at.block, routers + blocks};
  if (has_expert_rows(args.params.output.layout)) {
    ht_route<true>(args, at, of_all, shared);
  } else {
    ht_route<false>(args, at, of_all, shared);
  }
}

// Those of expert rows have copies to make, and many threads.
template <class Call>
void for_each_kernel(const Call& call) {
  call(&ht_dispatch_rows<false, false, kFewThreads>);
  call(&ht_dispatch_rows<false, true, kFewThreads>);
  call(&ht_dispatch_rows<false, false, kManyThreads>);
  call(&ht_dispatch_rows<false, true, kManyThreads>);
  call(&ht_dispatch_rows<true, false, kManyThreads>);
  call(&ht_dispatch_rows<true, true, kManyThreads>);
}

template <bool kQuant>
auto kernel_for(const KernelArgs<HtDispatchParams>& args) {
  if (has_expert_rows(args.params.output.layout)) return &ht_dispatch_rows<true, kQuant, kManyThreads>;
  return args.plan.threads() <= kFewThreads ? &ht_dispatch_rows<false, kQuant, kFewThreads>
                                            : &ht_dispatch_rows<false, kQuant, kManyThreads>;
}

}  // namespace

HtPlan plan_of(const HtDispatchParams& p, int, int num_sms) {
  const auto sms_for = [&](HtWork work) { return p.num_sms > 0 ? num_sms : default_ht_sms(work, num_sms); };
  HtPlan plan{.blocks = 0};
  if (sends_rows(p.steps)) {
    const HtSendGeometry shapes = HtSendGeometry::shapes_of(p);
    const HtWork work{.converts = p.quant != Quant::kNone, .copies = shapes.has_copies(p.output.layout)};
    plan = plan_ht_dispatch(shapes.stage_bytes, kHtSharedBytes, work, p.shape.num_ranks, sms_for(work));
  }
  if (routes(p.steps)) add_routers(plan, sms_for({}));
  return tuned("EP_PLAN_HD", plan);
}

HtDispatchGeometry geometry_of(const HtDispatchParams& p, const HtPlan& plan) {
  return HtDispatchGeometry::of(p, plan);
}

void check_served(const HtDispatchParams& p) {
  check_ht_ranks(p.layout.topology);
  if (!sends_rows(p.steps)) return;
  const int bytes = HtSendGeometry::of(p, plan_of(p, 0, 1)).bytes;
  EP_CHECK(bytes <= kMaxSharedBytes, p.shape.num_experts, " experts and rows of ", p.parts[0].bytes, " bytes need ",
           bytes, " bytes of shared memory, high throughput on CUDA has ", kMaxSharedBytes);
}

void load_ht_dispatch_kernels() {
  for_each_kernel([](auto* kernel) { load_kernel(kernel, kMaxSharedBytes); });
  load_kernel(&ht_dispatch_rows_world<false>, kMaxSharedBytes);
  load_kernel(&ht_dispatch_rows_world<true>, kMaxSharedBytes);
}

std::vector<std::vector<uint64_t>> ht_dispatch_stamps() { return read_stamps(); }

void launch(const KernelArgs<HtDispatchParams>& args, void* stream) {
  const bool converts = args.params.quant != Quant::kNone;
  launch_kernel(converts ? kernel_for<true>(args) : kernel_for<false>(args), args.plan.grid(), args.plan.threads(),
                args.geometry.bytes, args.plan.pdl, stream, args);
}

template <>
void launch_world(const KernelArgs<HtDispatchParams>* host_args, const KernelArgs<HtDispatchParams>* args,
                  int num_ranks, void* stream) {
  const auto [blocks, threads, bytes] = LargestLaunch::of(host_args, num_ranks);
  const int routers = host_args->plan.routers;
  for (int r = 1; r < num_ranks; r++) {
    EP_CHECK(host_args[r].plan.routers == routers, "rank 0 routes a dispatch with ", routers, " SMs, rank ", r,
             " with ", host_args[r].plan.routers, ": in a world on one GPU they must be equal");
  }
  const auto kernel =
      host_args->params.quant != Quant::kNone ? &ht_dispatch_rows_world<true> : &ht_dispatch_rows_world<false>;
  launch_kernel(kernel, (routers + blocks) * num_ranks, threads, bytes, false, stream, args, num_ranks, routers,
                blocks);
}

}  // namespace ep
