#define EP_NETWORK ::ep::OneGpuNetwork
#define EP_NETWORK_HEADER "cuda/network/one_gpu_nic.cuh"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/host/one_gpu/same_kernel.h"
#include "cuda/host/one_gpu/world.h"
#include "cuda/ll/links/combine_launch.cuh"

namespace ep {

namespace ll {
namespace {

template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted>
__global__ void __launch_bounds__(kMaxThreads, 1)
    combine_by_rail_world(const LlArgs<LlCombineParams>* all, int num_ranks, int blocks) {
  run_in_one_gpu(all, num_ranks, blocks, [&](const LlArgs<LlCombineParams>& args, int block) {
    combine_block<kIn, kWire, kOut, kHome, kUnweighted>(args, block);
  });
}

}  // namespace
}  // namespace ll

namespace {

__global__ void __launch_bounds__(kScalarThreads)
    rail_scalars_world(const LlArgs<LlCombineWeightsParams>* all, int num_ranks, int blocks) {
  run_in_one_gpu(all, num_ranks, blocks,
                 [&](const LlArgs<LlCombineWeightsParams>& args, int block) { scalars_block(args, block); });
}

template <class Params>
void launch_all(const void* host_args, const void* args, int num_ranks, void* stream) {
  const auto& first = *static_cast<const LlArgs<Params>*>(host_args);
  const int blocks = first.rail.blocks() + first.plan.blocks;
  const auto start = [&](auto* kernel) {
    launch_kernel(kernel, num_ranks * blocks + 1, first.plan.threads(), 0, false, stream,
                  static_cast<const LlArgs<Params>*>(args), num_ranks, blocks);
  };
  if constexpr (std::is_same_v<Params, LlCombineWeightsParams>) {
    start(&rail_scalars_world);
  } else {
    const auto* all = static_cast<const LlArgs<Params>*>(host_args);
    for (int r = 1; r < num_ranks; r++) check_same_kernel(first.params, all[r].params, r);
    with_instance(first.params, [&](auto types, auto home, auto unweighted) {
      using T = decltype(types);
      start(&ll::combine_by_rail_world<T::in, T::wire, T::out, home(), unweighted()>);
    });
  }
}

}  // namespace

void load_crossing_combine() {
  for_all_types([](auto types) {
    using T = decltype(types);
    load_kernel(&ll::combine_by_rail_world<T::in, T::wire, T::out, false, false>, 0);
    load_kernel(&ll::combine_by_rail_world<T::in, T::wire, T::out, true, false>, 0);
    load_kernel(&ll::combine_by_rail_world<T::in, T::wire, T::out, true, true>, 0);
  });
  load_kernel(&rail_scalars_world, 0);
}

void run_on_one_gpu(World& world, const KernelArgs<LlCombineParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream) {
  const LlArgs<LlCombineParams> own{args, rail, network};
  world.run(args.peers.rank, {"combine", &launch_all<LlCombineParams>, sizeof own, stream}, &own);
}

void run_on_one_gpu(World& world, const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail,
                    const OneGpuNetworkArgs& network, void* stream) {
  const LlArgs<LlCombineWeightsParams> own{args, rail, network};
  world.run(args.peers.rank, {"combine_weights", &launch_all<LlCombineWeightsParams>, sizeof own, stream}, &own);
}

}  // namespace ep
