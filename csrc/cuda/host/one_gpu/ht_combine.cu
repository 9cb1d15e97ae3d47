#include "cuda/device/with_types.h"
#include "cuda/host/one_gpu/largest_launch.h"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/ht/combine.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace ht {
namespace {

template <DType kIn, DType kWire, DType kOut>
__global__ void __launch_bounds__(32 * HtCombineGeometry::kMaxWarps, 1)
    combine_rows_world(const KernelArgs<HtCombineParams>* all, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_combine<kIn, kWire, kOut>(all[blockIdx.x / blocks], BlockPosition::in_world(blocks), shared);
}

[[maybe_unused]] const bool has_stamps = add_stamps_reader("ht_combine", &read_stamps);

}  // namespace
}  // namespace ht

void load_world_ht_combine() {
  for_all_types([](auto types) {
    using T = decltype(types);
    load_kernel(&ht::combine_rows_world<T::in, T::wire, T::out>, kMaxSharedBytes);
  });
}

void launch_world(const KernelArgs<HtCombineParams>* host_args, const KernelArgs<HtCombineParams>* args, int num_ranks,
                  void* stream) {
  const LargestLaunch largest = LargestLaunch::of(host_args, num_ranks);
  with_types(host_args->params.dtype, host_args->params.options.wire_dtype, host_args->params.options.out_dtype,
             [&](auto types) {
               using T = decltype(types);
               launch_kernel(&ht::combine_rows_world<T::in, T::wire, T::out>, largest.blocks * num_ranks,
                             largest.threads, largest.bytes, false, stream, args, largest.blocks);
             });
}

}  // namespace ep
