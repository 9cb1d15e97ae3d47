#define EP_NETWORK ::ep::OneGpuNetwork
#define EP_NETWORK_HEADER "cuda/network/one_gpu_nic.cuh"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/host/one_gpu/world.h"
#include "cuda/ll/links/dispatch_launch.cuh"

namespace ep {

namespace ll {
namespace {

template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
__global__ void __launch_bounds__(max_threads(kSteps), 1)
    dispatch_by_rail_world(const LlArgs<LlDispatchParams>* all, int num_ranks, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  run_in_one_gpu(all, num_ranks, blocks, [&](const LlArgs<LlDispatchParams>& args, int block) {
    dispatch_block<kEncoding, kType, kSteps, kLayout>(args, block, shared);
  });
}

}  // namespace
}  // namespace ll

namespace {

void launch_all(const void* host_args, const void* args, int num_ranks, void* stream) {
  const auto& first = *static_cast<const LlArgs<LlDispatchParams>*>(host_args);
  const int blocks = first.rail.blocks() + first.plan.blocks;
  with_instance(first.params, first.plan.steps, [&](auto instance) {
    using I = decltype(instance);
    launch_kernel(&ll::dispatch_by_rail_world<I::encoding, I::type, I::steps, I::layout>, num_ranks * blocks + 1,
                  first.plan.threads(), static_cast<int>(first.geometry.bitmap.bytes), false, stream,
                  static_cast<const LlArgs<LlDispatchParams>*>(args), num_ranks, blocks);
  });
}

}  // namespace

void load_crossing_dispatch() {
  for_all_instances([](auto instance) {
    using I = decltype(instance);
    load_kernel(&ll::dispatch_by_rail_world<I::encoding, I::type, I::steps, I::layout>, kMaxSharedBytes);
  });
}

void run_on_one_gpu(World& world, const KernelArgs<LlDispatchParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream) {
  const LlArgs<LlDispatchParams> own{args, rail, network};
  world.run(args.peers.rank, {"dispatch", &launch_all, sizeof own, stream}, &own);
}

}  // namespace ep
