// The template arguments of low-latency dispatch, from its params.
#pragma once

#include "cuda/device/row_piece.cuh"
#include "runtime/ll/params.h"

namespace ep {
namespace {

// As in plan_dispatch(): pieces of four steps need more registers a thread.
constexpr int max_threads(int steps) { return steps <= 2 ? 640 : 512; }

template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
struct Instance {
  static constexpr Encoding encoding = kEncoding;
  static constexpr DType type = kType;
  static constexpr int steps = kSteps;
  static constexpr OutputLayout layout = kLayout;
};

// Calls body with the template instance for these parameters.
template <OutputLayout kLayout, class Body>
void with_encoding(const LlDispatchParams& p, int steps, Body body) {
  constexpr OutputLayout k = kLayout;
  if (is_nvfp4(p.options.quant) && p.dtype == DType::kBF16) return body(Instance<Encoding::kFp4, DType::kBF16, 1, k>{});
  if (is_nvfp4(p.options.quant)) return body(Instance<Encoding::kFp4, DType::kF16, 1, k>{});
  if (is_mxfp8(p.options.quant) && p.dtype == DType::kBF16)
    return body(Instance<Encoding::kMxFp8, DType::kBF16, 2, k>{});
  if (is_mxfp8(p.options.quant)) return body(Instance<Encoding::kMxFp8, DType::kF16, 2, k>{});
  if (p.options.quant != Quant::kNone && p.dtype == DType::kBF16)
    return body(Instance<Encoding::kFp8, DType::kBF16, 2, k>{});
  if (p.options.quant != Quant::kNone) return body(Instance<Encoding::kFp8, DType::kF16, 2, k>{});
  if (p.row.is_keyed) return body(Instance<Encoding::kKeyed, DType::kBF16, 2, k>{});
  if (steps == 2) return body(Instance<Encoding::kFloat, DType::kBF16, 2, k>{});
  return body(Instance<Encoding::kFloat, DType::kBF16, 4, k>{});
}
template <class Body>
void with_instance(const LlDispatchParams& p, int steps, Body body) {
  switch (p.output.layout) {
    case OutputLayout::kExpertMajor:
      return with_encoding<OutputLayout::kExpertMajor>(p, steps, body);
    case OutputLayout::kPacked:
      return with_encoding<OutputLayout::kPacked>(p, steps, body);
    case OutputLayout::kRankMajor:
      return with_encoding<OutputLayout::kRankMajor>(p, steps, body);
    case OutputLayout::kFlat:
      return with_encoding<OutputLayout::kFlat>(p, steps, body);
  }
}

// Calls body with every instance, with some more than once.
template <class Body>
void for_all_instances(Body body) {
  constexpr OutputLayout kLayouts[] = {OutputLayout::kExpertMajor, OutputLayout::kPacked, OutputLayout::kRankMajor,
                                       OutputLayout::kFlat};
  LlDispatchParams p;
  for (int steps : {2, 4}) {
    for (bool is_keyed : {false, true}) {
      for (DType dtype : {DType::kBF16, DType::kF16}) {
        for (Quant quant : {Quant::kNone, Quant::kFp8, Quant::kMxfp8, Quant::kNvfp4}) {
          for (OutputLayout layout : kLayouts) {
            p.output.layout = layout;
            p.row.is_keyed = is_keyed;
            p.dtype = dtype;
            p.options.quant = quant;
            with_instance(p, steps, body);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ep
