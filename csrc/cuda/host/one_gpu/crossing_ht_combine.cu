#define EP_NETWORK ::ep::OneGpuNetwork
#define EP_NETWORK_HEADER "cuda/network/one_gpu_nic.cuh"
#include "cuda/host/one_gpu/largest_launch.h"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/host/one_gpu/world.h"
#include "cuda/ht/links/combine_launch.cuh"

namespace ep {
namespace ht {
namespace {

template <DType kIn, DType kWire, DType kOut>
__global__ void __launch_bounds__(32 * HtCombineGeometry::kMaxWarps, 1)
    combine_by_rail_world(const HtArgs<HtCombineParams>* all, int num_ranks, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  run_in_one_gpu(all, num_ranks, blocks, [&](const HtArgs<HtCombineParams>& args, int block) {
    ht_combine<kIn, kWire, kOut>(args, {block, blocks}, shared);
  });
}

void launch_combine(const void* host_args, const void* args, int num_ranks, void* stream) {
  const auto* first = static_cast<const HtArgs<HtCombineParams>*>(host_args);
  const auto [blocks, threads, bytes] = LargestLaunch::of(first, num_ranks);
  const HtCombineParams& p = first->params;
  with_types(p.dtype, p.options.wire_dtype, p.options.out_dtype,
             [&, blocks = blocks, threads = threads, bytes = bytes](auto types) {
               using T = decltype(types);
               launch_kernel(&combine_by_rail_world<T::in, T::wire, T::out>, num_ranks * blocks + 1, threads, bytes,
                             false, stream, static_cast<const HtArgs<HtCombineParams>*>(args), num_ranks, blocks);
             });
}

}  // namespace
}  // namespace ht

void load_crossing_ht_combine() {
  for_all_types([](auto types) {
    using T = decltype(types);
    load_kernel(&ht::combine_by_rail_world<T::in, T::wire, T::out>, kMaxSharedBytes);
  });
}

void run_on_one_gpu(World& world, const KernelArgs<HtCombineParams>& args, const HtRail& rail,
                    const OneGpuNetworkArgs& network, void* stream) {
  const HtArgs<HtCombineParams> own{args, rail, network};
  world.run(args.peers.rank, {"a combine of high throughput", &ht::launch_combine, sizeof own, stream}, &own);
}

}  // namespace ep
