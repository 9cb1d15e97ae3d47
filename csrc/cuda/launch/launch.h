// From a plan to a running kernel.
#pragma once

#include "cuda/ht/common/geometry.h"
#include "cuda/ll/common/geometry.h"
#include "cuda/protocol/kernel_args.h"

namespace ep {

// The plan for `tokens` tokens on so much of a GPU, and what follows from it.
LlPlan plan_of(const LlDispatchParams& params, int tokens, const Arch& arch);
LlPlan plan_of(const LlCombineParams& params, int tokens, const Arch& arch);
LlPlan plan_of(const LlCombineWeightsParams& params, int tokens, const Arch& arch);
HtPlan plan_of(const HtRouteParams& params, int tokens, const Arch& arch);
HtPlan plan_of(const HtCombineParams& params, int tokens, const Arch& arch);
LlDispatchGeometry geometry_of(const LlDispatchParams& params, const LlPlan& plan);
LlCombineGeometry geometry_of(const LlCombineParams& params, const LlPlan& plan);
NoGeometry geometry_of(const LlCombineWeightsParams& params, const LlPlan& plan);
HtRouteGeometry geometry_of(const HtRouteParams& params, const HtPlan& plan);
HtCombineGeometry geometry_of(const HtCombineParams& params, const HtPlan& plan);

// Refuses what these kernels cannot serve on such a GPU, with the values.
void check_served(const LlDispatchParams& params, const Arch& arch);
void check_served(const HtCombineParams& params, const Arch& arch);
template <class Params>
void check_served(const Params&, const Arch&) {}

// All of it at once: checked, planned, worked out.
template <class Params>
struct Launch {
  typename PlanOf<Params>::Type plan;
  typename GeometryOf<Params>::Type geometry;
};
template <class Params>
Launch<Params> launch_of(const Params& params, int tokens, const Arch& arch) {
  check_served(params, arch);
  const auto plan = plan_of(params, tokens, arch);
  return {plan, geometry_of(params, plan)};
}
Launch<HtDispatchParams> launch_of(const HtDispatchParams& params, int tokens, const Arch& arch);

// What a buffer runs.
struct KernelSets {
  bool ll, ht;
  bool masks_ranks;  // low latency
};
// Loads these kernels, so that none is loaded while another spins. Throws kSystem.
void load_kernels(const KernelSets& sets);

// One rank a GPU. `stream` is a cudaStream_t.
void launch(const KernelArgs<LlDispatchParams>& args, void* stream);
void launch(const KernelArgs<LlCombineParams>& args, void* stream);
void launch(const KernelArgs<LlCombineWeightsParams>& args, void* stream);
void launch(const KernelArgs<HtRouteParams>& args, void* stream);
void launch(const KernelArgs<HtDispatchParams>& args, void* stream);
void launch(const KernelArgs<HtCombineParams>& args, void* stream);

// Combine on few SMs has kernels of its own: launch() chooses them.
void launch_streamed(const KernelArgs<LlCombineParams>& args, void* stream);
// So has low-latency dispatch with arrivals, high-throughput combine with row_signals, and low latency with masks.
void launch_announcing(const KernelArgs<LlDispatchParams>& args, void* stream);
void launch_signalled(const KernelArgs<HtCombineParams>& args, void* stream);
void launch_masking(const KernelArgs<LlDispatchParams>& args, void* stream);
void launch_masking(const KernelArgs<LlCombineParams>& args, void* stream);
void launch_masking(const KernelArgs<LlCombineWeightsParams>& args, void* stream);
}  // namespace ep
