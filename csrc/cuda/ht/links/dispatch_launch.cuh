// The kernels of high-throughput dispatch that cross domains, over the network EP_NETWORK (kernel_set.cuh).
#pragma once

#include "cuda/ht/dispatch.cuh"
#include "cuda/ht/route.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {

namespace ht {
namespace {

constexpr int kRailRouteThreads = 1024, kRailSendThreads = 896;  // as those of one domain have at most

template <bool kExpertRows>
__global__ void __launch_bounds__(kRailRouteThreads, 1)
    route_by_rail(const __grid_constant__ HtArgs<HtRouteParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_route<kExpertRows>(args, BlockPosition::own(), shared);
}

template <bool kQuant>
__global__ void __launch_bounds__(kRailSendThreads, 1)
    dispatch_by_rail(const __grid_constant__ HtArgs<HtDispatchParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_send<kQuant, true>(args, BlockPosition::own(), shared);
}

}  // namespace
}  // namespace ht

namespace {

[[maybe_unused]] const bool has_stamps = add_stamps_reader("ht_dispatch", &read_stamps);

void load_ht_rail_dispatch() {
  for (auto* kernel : {&ht::route_by_rail<false>, &ht::route_by_rail<true>}) {
    // As the kernel that follows: an SM that changes its split of memory waits until it is empty.
    EP_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
    load_kernel(kernel, kMaxSharedBytes);
  }
  load_kernel(&ht::dispatch_by_rail<false>, kMaxSharedBytes);
  load_kernel(&ht::dispatch_by_rail<true>, kMaxSharedBytes);
}

void launch_rail(const HtArgs<HtRouteParams>& args, void* stream) {
  const bool expert_rows = has_expert_rows(args.params.output.layout);
  launch_kernel(expert_rows ? &ht::route_by_rail<true> : &ht::route_by_rail<false>, args.plan.blocks,
                args.plan.threads(), args.geometry.bytes, args.plan.pdl, stream, args);
}

void launch_rail(const HtArgs<HtDispatchParams>& args, void* stream) {
  const bool converts = args.params.options.quant != Quant::kNone;
  launch_kernel(converts ? &ht::dispatch_by_rail<true> : &ht::dispatch_by_rail<false>, args.plan.blocks,
                args.plan.threads(), args.geometry.bytes, args.plan.pdl, stream, args);
}

}  // namespace
}  // namespace ep
