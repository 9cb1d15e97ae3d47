// The first kernel of a dispatch that routes.
#include "base/check.h"
#include "cuda/ht_route.cuh"
#include "cuda/launch_util.h"

namespace ep {
namespace {

constexpr int kRouteThreads = 1024;

__global__ void __launch_bounds__(kRouteThreads, 1)
    ht_dispatch_route(const __grid_constant__ KernelArgs<HtRouteParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_route(args, BlockPosition::own(), shared);
}

__global__ void __launch_bounds__(kRouteThreads, 1)
    ht_dispatch_route_world(const KernelArgs<HtRouteParams>* all, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_route(all[blockIdx.x / blocks], BlockPosition::in_world(blocks), shared);
}

}  // namespace

HtPlan plan_of(const HtRouteParams& p, int, int num_sms) {
  return plan_ht_route(p.num_sms > 0 ? num_sms : default_ht_sms({}, num_sms));
}

HtRouteGeometry geometry_of(const HtRouteParams& p, const HtPlan& plan) { return HtRouteGeometry::of(p, plan); }

void load_ht_route_kernels() {
  // As the kernel that follows: an SM that changes its split of memory waits until it is empty.
  EP_CUDA(cudaFuncSetAttribute(&ht_dispatch_route, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
  load_kernel(&ht_dispatch_route, kMaxSharedBytes);
  load_kernel(&ht_dispatch_route_world, kMaxSharedBytes);
}

std::vector<std::vector<uint64_t>> ht_route_stamps() { return read_stamps(); }

void launch(const KernelArgs<HtRouteParams>& args, void* stream) {
  launch_kernel(&ht_dispatch_route, args.plan.blocks, args.plan.threads(), args.geometry.bytes, args.plan.pdl, stream,
                args);
}

template <>
void launch_world(const KernelArgs<HtRouteParams>* host_args, const KernelArgs<HtRouteParams>* args, int num_ranks,
                  void* stream) {
  const auto [blocks, threads, bytes] = LargestLaunch::of(host_args, num_ranks);
  for (int r = 1; r < num_ranks; r++) {
    EP_CHECK(host_args[r].plan.blocks == blocks, "rank 0 gives a dispatch ", blocks, " SMs, rank ", r, " gives it ",
             host_args[r].plan.blocks, ": in a world on one GPU they must be equal");
  }
  launch_kernel(&ht_dispatch_route_world, blocks * num_ranks, threads, bytes, false, stream, args, blocks);
}

}  // namespace ep
