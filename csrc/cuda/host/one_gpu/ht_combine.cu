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

// Of rows that a kernel on another stream still writes, on one of the ranks at least.
template <DType kType>
__global__ void __launch_bounds__(32 * HtCombineGeometry::kMaxWarps, 1)
    combine_signalled_rows_world(const KernelArgs<HtCombineParams>* all, int blocks) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_combine<kType, kType, kType, true>(all[blockIdx.x / blocks], BlockPosition::in_world(blocks), shared);
}

[[maybe_unused]] const bool has_stamps = add_stamps_reader("ht_combine", &read_stamps);

}  // namespace
}  // namespace ht

void load_world_ht_combine() {
  for_all_types([](auto types) {
    using T = decltype(types);
    load_kernel(&ht::combine_rows_world<T::in, T::wire, T::out>, kMaxSharedBytes);
  });
  for_all_row_types([](auto type) { load_kernel(&ht::combine_signalled_rows_world<type()>, kMaxSharedBytes); });
}

void launch_world(const KernelArgs<HtCombineParams>* host_args, const KernelArgs<HtCombineParams>* args, int num_ranks,
                  void* stream) {
  const LargestLaunch largest = LargestLaunch::of(host_args, num_ranks);
  bool is_signalled = false;  // of any rank; the rows of the others are there
  for (int r = 0; r < num_ranks; r++) is_signalled = is_signalled || host_args[r].params.signals.counters != nullptr;
  if (is_signalled) {
    return with_row_type(host_args->params.dtype, [&](auto type) {
      launch_kernel(&ht::combine_signalled_rows_world<type()>, largest.blocks * num_ranks, largest.threads,
                    largest.bytes, false, stream, args, largest.blocks);
    });
  }
  with_types(host_args->params.dtype, host_args->params.options.wire_dtype, host_args->params.options.out_dtype,
             [&](auto types) {
               using T = decltype(types);
               launch_kernel(&ht::combine_rows_world<T::in, T::wire, T::out>, largest.blocks * num_ranks,
                             largest.threads, largest.bytes, false, stream, args, largest.blocks);
             });
}

}  // namespace ep
