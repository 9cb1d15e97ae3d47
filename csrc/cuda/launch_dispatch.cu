#include "base/check.h"
#include "cuda/launch_util.h"
#include "cuda/ll_dispatch.cuh"

namespace ep {
namespace {

// As in plan_dispatch(): pieces of four steps need more registers a thread.
constexpr int max_threads(int steps) { return steps == 2 ? 640 : 512; }

template <Payload kPayload, DType kType, int kSteps>
__global__ void __launch_bounds__(max_threads(kSteps), 1)
    ll_dispatch(const __grid_constant__ KernelArgs<LlDispatchParams> args) {
  extern __shared__ __align__(128) char shared[];
  const BlockPosition at{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  dispatch<kPayload, kType, kSteps>(args.params, args.peers, args.state, args.plan, at, shared);
}

template <Payload kPayload, DType kType, int kSteps>
__global__ void __launch_bounds__(max_threads(kSteps), 1)
    ll_dispatch_world(const KernelArgs<LlDispatchParams>* all, int blocks) {
  extern __shared__ __align__(128) char shared[];
  const KernelArgs<LlDispatchParams>& args = all[blockIdx.x / blocks];
  dispatch<kPayload, kType, kSteps>(args.params, args.peers, args.state, args.plan,
                                    {static_cast<int>(blockIdx.x) % blocks, blocks}, shared);
}

template <Payload kPayload, DType kType, int kSteps>
struct Instance {
  static constexpr Payload payload = kPayload;
  static constexpr DType type = kType;
  static constexpr int steps = kSteps;
};

// Calls body with the template instance for these parameters.
template <class Body>
void with_instance(const LlDispatchParams& p, int steps, Body body) {
  if (p.quant != Quant::kNone && p.dtype == DType::kBF16) return body(Instance<Payload::kFp8, DType::kBF16, 2>{});
  if (p.quant != Quant::kNone) return body(Instance<Payload::kFp8, DType::kF16, 2>{});
  if (p.row.is_keyed) return body(Instance<Payload::kKeyed, DType::kBF16, 2>{});
  if (steps == 2) return body(Instance<Payload::kFloat, DType::kBF16, 2>{});
  return body(Instance<Payload::kFloat, DType::kBF16, 4>{});
}

int shared_bytes(const LlDispatchParams& p) { return static_cast<int>(Places::bytes(p.shape, p.output, p.layout.ids)); }

}  // namespace

LlPlan plan_of(const LlDispatchParams& p, int tokens, int num_sms) {
  return tuned("EP_PLAN_D",
               plan_dispatch({tokens, p.row.wire_bytes(), p.quant != Quant::kNone || p.row.is_keyed}, num_sms));
}

void check_served(const LlDispatchParams& p) {
  const int64_t bytes = Places::bytes(p.shape, p.output, p.layout.ids);
  EP_CHECK(bytes <= kMaxSharedBytes, p.shape.num_experts, " experts, max_tokens ", p.shape.max_tokens, " and top-",
           p.shape.topk, " need ", bytes, " bytes of shared memory, low-latency mode on CUDA has ", kMaxSharedBytes);
  EP_CHECK(p.shape.num_ranks <= 64, p.shape.num_ranks, " ranks, low-latency mode on CUDA serves 64");
}

void load_dispatch_kernels() {
  const auto load = [](auto instance) {
    using I = decltype(instance);
    load_kernel(&ll_dispatch<I::payload, I::type, I::steps>, kMaxSharedBytes);
    load_kernel(&ll_dispatch_world<I::payload, I::type, I::steps>, kMaxSharedBytes);
  };
  LlDispatchParams p;
  for (int steps : {2, 4}) {
    for (bool is_keyed : {false, true}) {
      for (DType dtype : {DType::kBF16, DType::kF16}) {
        for (Quant quant : {Quant::kNone, Quant::kFp8}) {
          p.row.is_keyed = is_keyed;
          p.dtype = dtype;
          p.quant = quant;
          with_instance(p, steps, load);
        }
      }
    }
  }
}

std::vector<std::vector<uint64_t>> dispatch_stamps() { return read_stamps(); }

void launch(const KernelArgs<LlDispatchParams>& args, void* stream) {
  with_instance(args.params, args.plan.steps, [&](auto instance) {
    using I = decltype(instance);
    launch_kernel(&ll_dispatch<I::payload, I::type, I::steps>, args.plan.blocks, args.plan.threads(),
                  shared_bytes(args.params), args.plan.pdl, stream, args);
  });
}

template <>
void launch_world(const KernelArgs<LlDispatchParams>* host_args, const KernelArgs<LlDispatchParams>* args,
                  int num_ranks, void* stream) {
  const LlPlan& plan = host_args->plan;
  with_instance(host_args->params, plan.steps, [&](auto instance) {
    using I = decltype(instance);
    launch_kernel(&ll_dispatch_world<I::payload, I::type, I::steps>, plan.blocks * num_ranks, plan.threads(),
                  shared_bytes(host_args->params), false, stream, args, plan.blocks);
  });
}

}  // namespace ep
