// The kernels of low-latency combine on few SMs, for all ranks of a world on one GPU.
#include "cuda/host/one_gpu/launches.h"
#include "cuda/host/one_gpu/same_kernel.h"
#include "cuda/launch/launch_util.h"
#include "cuda/ll/combine.cuh"
#include "cuda/ll/combine/instances.cuh"

namespace ep {

namespace ll {
namespace {

template <DType kType, bool kHome>
__global__ void __launch_bounds__(kMaxStreamThreads, 1)
    combine_streamed_world(const KernelArgs<LlCombineParams>* all, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  ep::combine_streamed<kType, kHome>(all[blockIdx.x / blocks], BlockPosition::in_world(blocks), shared);
}

}  // namespace
}  // namespace ll

[[maybe_unused]] static const bool has_stamps = add_stamps_reader("ll_streamed_combine", &read_stamps);

void load_world_streamed_combine() {
  for_all_streamed(
      [](auto type, auto home) { load_kernel(&ll::combine_streamed_world<type(), home()>, kMaxSharedBytes); });
}

void launch_streamed_world(const KernelArgs<LlCombineParams>* host_args, const KernelArgs<LlCombineParams>* args,
                           int num_ranks, void* stream) {
  const LlPlan& plan = host_args->plan;
  for (int r = 1; r < num_ranks; r++) {
    check_same_kernel(host_args->params, host_args[r].params, r);
    EP_CHECK(host_args[r].plan.streams, "of ranks 0 and ", r,
             " one streams its rows: in a world on one GPU all must, or none");
  }
  with_streamed(host_args->params, [&](auto type, auto home) {
    launch_kernel(&ll::combine_streamed_world<type(), home()>, plan.blocks * num_ranks, plan.threads(),
                  host_args->geometry.ring_bytes, false, stream, args, plan.blocks);
  });
}

}  // namespace ep
