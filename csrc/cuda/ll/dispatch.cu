#include "cuda/ll/dispatch_launch.cuh"

namespace ep {

LlPlan plan_of(const LlDispatchParams& p, int tokens, const Arch& arch) {
  LlPlan plan = plan_dispatch({tokens, p.row.wire_bytes(), p.is_heavy()}, arch);
  if (is_nvfp4(p.options.quant)) plan.steps = 1;  // of which a warp loads as much as of two of FP8
  return tuned("EP_PLAN_D", plan);
}

LlDispatchGeometry geometry_of(const LlDispatchParams& p, const LlPlan& plan) {
  return LlDispatchGeometry::of(p, plan);
}

void check_served(const LlDispatchParams& p, const Arch& arch) {
  const int64_t bytes = RoutingBitmapShape::of(p).bytes;
  EP_CHECK(bytes <= arch.dynamic_bytes(), p.shape.num_ranks, " ranks, ", p.shape.num_experts, " experts, max_tokens ",
           p.shape.max_tokens, " and top-", p.shape.topk, " need ", bytes,
           " bytes of shared memory, low-latency mode has ", arch.dynamic_bytes(), " on this GPU");
}

void load_dispatch_kernels() {
  load_all();
  load_announcing_dispatch_kernels();
}

[[maybe_unused]] static const bool has_stamps = add_stamps_reader("ll_dispatch", &read_stamps);

void launch(const KernelArgs<LlDispatchParams>& args, void* stream) {
  if (args.peers.can_be_masked) return launch_masking(args, stream);
  if (args.params.arrivals.state != nullptr) return launch_announcing(args, stream);
  launch_one(args, stream);
}

}  // namespace ep
