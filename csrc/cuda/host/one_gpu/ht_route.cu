#include "base/check.h"
#include "cuda/host/one_gpu/largest_launch.h"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/ht/route.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace ht {
namespace {

__global__ void __launch_bounds__(1024, 1) dispatch_route_world(const KernelArgs<HtRouteParams>* all, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  const auto& args = all[blockIdx.x / blocks];  // ranks may have different layouts
  if (has_expert_rows(args.params.output.layout)) {
    ht_route<true>(args, BlockPosition::in_world(blocks), shared);
  } else {
    ht_route<false>(args, BlockPosition::in_world(blocks), shared);
  }
}

[[maybe_unused]] const bool has_stamps = add_stamps_reader("ht_route", &read_stamps);

}  // namespace
}  // namespace ht

void load_world_ht_route() { load_kernel(&ht::dispatch_route_world, kMaxSharedBytes); }

void launch_world(const KernelArgs<HtRouteParams>* host_args, const KernelArgs<HtRouteParams>* args, int num_ranks,
                  void* stream) {
  const auto [blocks, threads, bytes] = LargestLaunch::of(host_args, num_ranks);
  for (int r = 1; r < num_ranks; r++) {
    EP_CHECK(host_args[r].plan.blocks == blocks, "rank 0 gives a dispatch ", blocks, " SMs, rank ", r, " gives it ",
             host_args[r].plan.blocks, ": in a world on one GPU they must be equal");
  }
  launch_kernel(&ht::dispatch_route_world, blocks * num_ranks, threads, bytes, false, stream, args, blocks);
}

}  // namespace ep
