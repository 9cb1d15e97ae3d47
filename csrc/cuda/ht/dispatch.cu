#include "base/check.h"
#include "cuda/ht/dispatch.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace ht {
namespace {

// As plan_ht_dispatch() has at most, and as it mostly has where nothing is copied: more registers, no code for copies.
constexpr int kManyThreads = 896, kFewThreads = 640;

template <bool kQuant, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_send(const __grid_constant__ KernelArgs<HtDispatchParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_send<kQuant, kThreads == kManyThreads>(args, BlockPosition::own(), shared);
}

}  // namespace
}  // namespace ht

namespace {

HtWork work_of(const HtDispatchParams& p, const HtSendGeometry& shapes) {
  return {.converts = p.options.quant != Quant::kNone,
          .copies = shapes.has_copies(p.output.layout),
          .stores = true,
          .is_narrow = shapes.stage_bytes <= kNarrowRow,
          .repeats = has_expert_rows(p.output.layout)};
}

}  // namespace

Launch<HtDispatchParams> launch_of(const HtDispatchParams& p, int, const Arch& arch) {
  const HtSendGeometry shapes = HtSendGeometry::shapes_of(p, arch.stage_bytes());
  const HtWork work = work_of(p, shapes);
  const int own_sms = p.options.num_sms == 0 ? default_ht_sms(work, p.shape.num_ranks, arch) : arch.num_sms;
  const HtPlan plan =
      tuned("EP_PLAN_HD", plan_ht_dispatch(shapes.stage_bytes, work, p.shape.num_ranks, arch.with_sms(own_sms)));
  HtPlan largest = plan;  // whether it is served depends on no number of SMs
  largest.workers = most_ht_workers(shapes.stage_bytes, work, p.shape.num_ranks, arch);
  const int bytes = HtSendGeometry::of(p, largest, shapes).bytes;
  EP_CHECK(bytes <= arch.dynamic_bytes(), p.shape.num_ranks, " ranks, ", p.shape.num_experts, " experts and rows of ",
           p.parts[0].bytes, " bytes need ", bytes, " bytes of shared memory, high throughput has ",
           arch.dynamic_bytes(), " on this GPU");
  return {plan, HtSendGeometry::of(p, plan, shapes)};
}

void load_ht_dispatch_kernels() {
  load_kernel(&ht::dispatch_send<false, ht::kFewThreads>, kMaxSharedBytes);
  load_kernel(&ht::dispatch_send<false, ht::kManyThreads>, kMaxSharedBytes);
  load_kernel(&ht::dispatch_send<true, ht::kFewThreads>, kMaxSharedBytes);
  load_kernel(&ht::dispatch_send<true, ht::kManyThreads>, kMaxSharedBytes);
}

[[maybe_unused]] static const bool has_stamps = add_stamps_reader("ht_dispatch", &read_stamps);

void launch(const KernelArgs<HtDispatchParams>& args, void* stream) {
  const bool copies = args.geometry.has_copies(args.params.output.layout);
  const bool is_small = args.plan.threads() <= ht::kFewThreads && !copies;
  auto kernel = is_small ? &ht::dispatch_send<false, ht::kFewThreads> : &ht::dispatch_send<false, ht::kManyThreads>;
  if (args.params.options.quant != Quant::kNone) {
    kernel = is_small ? &ht::dispatch_send<true, ht::kFewThreads> : &ht::dispatch_send<true, ht::kManyThreads>;
  }
  launch_kernel(kernel, args.plan.blocks, args.plan.threads(), args.geometry.bytes, args.plan.pdl, stream, args);
}

}  // namespace ep
