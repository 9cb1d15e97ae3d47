#include "cuda/host/one_gpu/largest_launch.h"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/ht/dispatch.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace ht {
namespace {

template <bool kQuant>
__global__ void __launch_bounds__(896, 1) dispatch_send_world(const KernelArgs<HtDispatchParams>* all, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_send<kQuant, true>(all[blockIdx.x / blocks], BlockPosition::in_world(blocks), shared);
}

[[maybe_unused]] const bool has_stamps = add_stamps_reader("ht_dispatch", &read_stamps);

}  // namespace
}  // namespace ht

void load_world_ht_dispatch() {
  load_kernel(&ht::dispatch_send_world<false>, kMaxSharedBytes);
  load_kernel(&ht::dispatch_send_world<true>, kMaxSharedBytes);
}

void launch_world(const KernelArgs<HtDispatchParams>* host_args, const KernelArgs<HtDispatchParams>* args,
                  int num_ranks, void* stream) {
  const auto [blocks, threads, bytes] = LargestLaunch::of(host_args, num_ranks);
  const auto kernel = host_args->params.options.quant != Quant::kNone ? &ht::dispatch_send_world<true>
                                                                      : &ht::dispatch_send_world<false>;
  launch_kernel(kernel, blocks * num_ranks, threads, bytes, false, stream, args, blocks);
}

}  // namespace ep
