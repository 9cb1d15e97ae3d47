// The kernels of high-throughput combine that cross domains, over the network EP_NETWORK (kernel_set.cuh).
#pragma once

#include "cuda/device/with_types.h"
#include "cuda/ht/combine.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {

namespace ht {
namespace {

template <DType kIn, DType kWire, DType kOut>
__global__ void __launch_bounds__(32 * HtCombineGeometry::kMaxWarps, 1)
    combine_by_rail(const __grid_constant__ HtArgs<HtCombineParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_combine<kIn, kWire, kOut>(args, BlockPosition::own(), shared);
}

}  // namespace
}  // namespace ht

namespace {

[[maybe_unused]] const bool has_stamps = add_stamps_reader("ht_combine", &read_stamps);

void load_ht_rail_combine() {
  for_all_types([](auto types) {
    using T = decltype(types);
    load_kernel(&ht::combine_by_rail<T::in, T::wire, T::out>, kMaxSharedBytes);
  });
}

void launch_rail(const HtArgs<HtCombineParams>& args, void* stream) {
  with_types(args.params.dtype, args.params.options.wire_dtype, args.params.options.out_dtype, [&](auto types) {
    using T = decltype(types);
    launch_kernel(&ht::combine_by_rail<T::in, T::wire, T::out>, args.plan.blocks, args.plan.threads(),
                  args.geometry.bytes, args.plan.pdl, stream, args);
  });
}

}  // namespace
}  // namespace ep
