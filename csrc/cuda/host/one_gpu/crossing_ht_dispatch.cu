#define EP_NETWORK ::ep::OneGpuNetwork
#define EP_NETWORK_HEADER "cuda/network/one_gpu_nic.cuh"
#include "cuda/host/one_gpu/largest_launch.h"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/host/one_gpu/world.h"
#include "cuda/ht/links/dispatch_launch.cuh"

namespace ep {
namespace ht {
namespace {

__global__ void __launch_bounds__(kRailRouteThreads, 1)
    route_by_rail_world(const HtArgs<HtRouteParams>* all, int num_ranks, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  run_in_one_gpu(all, num_ranks, blocks, [&](const HtArgs<HtRouteParams>& args, int block) {
    if (has_expert_rows(args.params.output.layout)) {  // ranks may have different layouts
      ht_route<true>(args, {block, blocks}, shared);
    } else {
      ht_route<false>(args, {block, blocks}, shared);
    }
  });
}

template <bool kQuant>
__global__ void __launch_bounds__(kRailSendThreads, 1)
    dispatch_by_rail_world(const HtArgs<HtDispatchParams>* all, int num_ranks, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  run_in_one_gpu(all, num_ranks, blocks, [&](const HtArgs<HtDispatchParams>& args, int block) {
    ht_send<kQuant, true>(args, {block, blocks}, shared);
  });
}

template <class Params, class Kernel>
void launch_all(Kernel kernel, const void* host_args, const void* args, int num_ranks, void* stream) {
  const auto [blocks, threads, bytes] = LargestLaunch::of(static_cast<const HtArgs<Params>*>(host_args), num_ranks);
  launch_kernel(kernel, num_ranks * blocks + 1, threads, bytes, false, stream, static_cast<const HtArgs<Params>*>(args),
                num_ranks, blocks);
}

void launch_route(const void* host_args, const void* args, int num_ranks, void* stream) {
  launch_all<HtRouteParams>(&route_by_rail_world, host_args, args, num_ranks, stream);
}

void launch_dispatch(const void* host_args, const void* args, int num_ranks, void* stream) {
  const bool converts = static_cast<const HtArgs<HtDispatchParams>*>(host_args)->params.options.quant != Quant::kNone;
  launch_all<HtDispatchParams>(converts ? &dispatch_by_rail_world<true> : &dispatch_by_rail_world<false>, host_args,
                               args, num_ranks, stream);
}

}  // namespace
}  // namespace ht

void load_crossing_ht_dispatch() {
  load_kernel(&ht::route_by_rail_world, kMaxSharedBytes);
  load_kernel(&ht::dispatch_by_rail_world<false>, kMaxSharedBytes);
  load_kernel(&ht::dispatch_by_rail_world<true>, kMaxSharedBytes);
}

void run_on_one_gpu(World& world, const KernelArgs<HtRouteParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream) {
  const HtArgs<HtRouteParams> own{args, rail, network};
  world.run(args.peers.rank, {"the routing of a dispatch", &ht::launch_route, sizeof own, stream}, &own);
}

void run_on_one_gpu(World& world, const KernelArgs<HtDispatchParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream) {
  const HtArgs<HtDispatchParams> own{args, rail, network};
  world.run(args.peers.rank, {"a dispatch of high throughput", &ht::launch_dispatch, sizeof own, stream}, &own);
}

}  // namespace ep
