// High-throughput combine of rows that a kernel on another stream still writes (RowSignals).
#include "cuda/device/with_types.h"
#include "cuda/ht/combine.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace ht {
namespace {

template <DType kType>
__global__ void __launch_bounds__(32 * HtCombineGeometry::kMaxWarps, 1)
    combine_signalled_rows(const __grid_constant__ KernelArgs<HtCombineParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_combine<kType, kType, kType, true>(args, BlockPosition::own(), shared);
}

}  // namespace
}  // namespace ht

void load_signalled_ht_combine_kernels() {
  for_all_row_types([](auto type) { load_kernel(&ht::combine_signalled_rows<type()>, kMaxSharedBytes); });
}

[[maybe_unused]] static const bool has_stamps = add_stamps_reader("ht_signalled_combine", &read_stamps);

void launch_signalled(const KernelArgs<HtCombineParams>& args, void* stream) {
  with_row_type(args.params.dtype, [&](auto type) {
    launch_kernel(&ht::combine_signalled_rows<type()>, args.plan.blocks, args.plan.threads(), args.geometry.bytes,
                  args.plan.pdl, stream, args);
  });
}

}  // namespace ep
