#include "cuda/ll/combine_launch.cuh"

namespace ep {

LlPlan plan_of(const LlCombineParams& p, int tokens, const Arch& arch) {
  LlPlan plan = tuned("EP_PLAN_C", plan_combine({tokens, p.hidden, p.phase != Phase::kFused,
                                                 p.phase == Phase::kFused && p.domain_size != p.shape.num_ranks,
                                                 can_stream(p) ? p.shape.max_tokens : 0},
                                                arch));
  plan.streams = plan.streams && can_stream(p);
  if (p.signals.counters != nullptr) {  // few blocks, and nobody in them receives
    plan.receiver_warps = 1;
    plan.sender_warps = plan.receiver_warp0 = plan.warps - 2;
  }
  return plan;
}

LlPlan plan_of(const LlCombineWeightsParams&, int, const Arch& arch) {
  LlPlan plan;
  plan.blocks = arch.num_sms;
  plan.warps = ll::kScalarThreads / 32;
  return plan;
}

LlCombineGeometry geometry_of(const LlCombineParams& p, const LlPlan& plan) {
  const bool is_wide =
      p.dtype == DType::kF32 || p.options.wire_dtype == DType::kF32 || p.options.out_dtype == DType::kF32;
  return LlCombineGeometry::of(p, plan, is_wide ? 4 : 8);
}
NoGeometry geometry_of(const LlCombineWeightsParams&, const LlPlan&) { return {}; }

void load_combine_kernels() {
  load_all();
  load_streamed_combine_kernels();
}

[[maybe_unused]] static const bool has_stamps = add_stamps_reader("ll_combine", &read_stamps);

void launch(const KernelArgs<LlCombineParams>& args, void* stream) {
  if (args.plan.streams) return launch_streamed(args, stream);
  return args.peers.can_be_masked ? launch_masking(args, stream) : launch_one(args, stream);
}

void launch(const KernelArgs<LlCombineWeightsParams>& args, void* stream) {
  return args.peers.can_be_masked ? launch_masking(args, stream) : launch_one(args, stream);
}

}  // namespace ep
