#include "cuda/device/with_types.h"
#include "cuda/ht/combine.cuh"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace ht {
namespace {

constexpr int kMaxThreads = 32 * HtCombineGeometry::kMaxWarps;

template <DType kIn, DType kWire, DType kOut, bool kTermsAlone>
__global__ void __launch_bounds__(kMaxThreads, 1)
    combine_rows(const __grid_constant__ KernelArgs<HtCombineParams> args) {
  EP_DYNAMIC_SHARED(char, shared);
  ht_combine<kIn, kWire, kOut, false, kTermsAlone>(args, BlockPosition::own(), shared);
}

// Biases and the scale have kernels of their own, so that the others have the registers of their sums.
bool has_terms_alone(const HtCombineParams& p) { return !has_bias(p) && p.options.scale == 1.0f; }

}  // namespace
}  // namespace ht

HtPlan plan_of(const HtCombineParams& p, int, const Arch& arch) {
  const HtWork work{.copies = HtCombineGeometry::stages(p),
                    .adds = has_expert_rows(p.output.layout),
                    .encodes = is_block_format(p.options.wire_dtype) && p.offsets.topology.num_domains() == 1};
  const Arch own = p.options.num_sms == 0 ? arch.with_sms(default_ht_sms(work, p.shape.num_ranks, arch)) : arch;
  return tuned("EP_PLAN_HC", plan_ht_combine(work, p.shape.num_ranks, own));
}

HtCombineGeometry geometry_of(const HtCombineParams& p, const HtPlan& plan) { return HtCombineGeometry::of(p, plan); }

void check_served(const HtCombineParams& p, const Arch& arch) {
  if (p.shape.num_ranks <= 64) return;  // whose tables Arch::stage_bytes() has left room for
  const int bytes = geometry_of(p, plan_of(p, 0, arch)).bytes;
  EP_CHECK(bytes <= arch.dynamic_bytes(), p.shape.num_ranks, " ranks need ", bytes,
           " bytes of shared memory, high throughput has ", arch.dynamic_bytes(), " on this GPU");
}

void load_ht_combine_kernels() {
  for_all_types([](auto types) {
    using T = decltype(types);
    load_kernel(&ht::combine_rows<T::in, T::wire, T::out, true>, kMaxSharedBytes);
    load_kernel(&ht::combine_rows<T::in, T::wire, T::out, false>, kMaxSharedBytes);
  });
  load_signalled_ht_combine_kernels();
}

[[maybe_unused]] static const bool has_stamps = add_stamps_reader("ht_combine", &read_stamps);

void launch(const KernelArgs<HtCombineParams>& args, void* stream) {
  if (args.params.signals.counters != nullptr) return launch_signalled(args, stream);
  with_types(args.params.dtype, args.params.options.wire_dtype, args.params.options.out_dtype, [&](auto types) {
    using T = decltype(types);
    const auto kernel = ht::has_terms_alone(args.params) ? &ht::combine_rows<T::in, T::wire, T::out, true>
                                                         : &ht::combine_rows<T::in, T::wire, T::out, false>;
    launch_kernel(kernel, args.plan.blocks, args.plan.threads(), args.geometry.bytes, args.plan.pdl, stream, args);
  });
}

}  // namespace ep
