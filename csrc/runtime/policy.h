// Rules that the ops of torch, their fakes and the C library share: each stands here once.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/math.h"
#include "layout/common/dtype.h"
#include "layout/common/outputs.h"
#include "layout/common/shape.h"
#include "layout/common/small_blocks.h"
#include "layout/ht/handle.h"
#include "runtime/ht/params.h"
#include "runtime/ll/params.h"

namespace ep {

// ---- Low latency (LL) or high throughput (HT)

// Bytes that a rank sends at most in a dispatch of max_tokens, up to which "auto" takes LL. On 4 H200s it is the faster
// mode at all that was measured, up to 1,024 tokens of 14 KiB (docs/performance.md; python -m bench fit). But
// it takes all SMs, where HT takes 12 to 32, and its window grows with the tokens of all ranks.
constexpr int64_t kAutoLlBytes = 56 << 20;
// LL keeps a slot for every token of every rank, in the SMs' shared memory too. Small rows go to HT beyond so many, but
// not the tokens that decoding has.
constexpr int64_t kAutoLlSlots = 4096, kAutoLlTokens = 128;

// max_tokens up to which "auto" takes LL. It follows from what is equal on all ranks, never from the tokens of one.
inline int64_t most_auto_ll_tokens(int64_t row_bytes, int64_t topk, int64_t num_ranks,
                                   int64_t auto_bytes = kAutoLlBytes) {
  const int64_t token_bytes = std::max<int64_t>(1, std::min(topk, num_ranks) * row_bytes);  // 0 is refused later
  return std::min(auto_bytes / token_bytes, std::max(kAutoLlSlots / num_ranks, kAutoLlTokens));
}

// ---- Outputs of a dispatch

// As a capacity: default_capacity().
constexpr int64_t kDefaultCapacity = -2;

// Rows that suffice for any routing in which no token names an expert twice.
inline int64_t default_capacity(OutputLayout layout, const Shape& shape, int64_t alignment) {
  if (layout == OutputLayout::kRankMajor) return shape.max_tokens;
  const int64_t tokens = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
  if (layout != OutputLayout::kPacked) return tokens;
  const int64_t local = shape.local_experts();
  return align_up(tokens * std::min<int64_t>(shape.topk, local) + local * (alignment - 1), alignment);
}

// Lengths of a tensor. Int: int64_t, or torch's SymInt, whose value a compiler has yet to learn.
template <class Int>
struct Dims {
  int ndim = 0;
  std::array<Int, 4> at{};

  Dims with(Int last) const {
    Dims dims = *this;
    dims.at[dims.ndim++] = last;
    return dims;
  }
};

// What a dispatch returns. `rows`: the leading lengths of every tensor of rows. ndim 0: the layout has no such tensor.
template <class Int>
struct DispatchDims {
  Dims<Int> rows, x, scales, weights, topk_idx, row_expert, info;

  // The capacity counts, not the one of `output`. num_scales: of a row, given by the caller; 0: none.
  static DispatchDims of(const OutputShape& output, Int capacity, Quant quant, Int hidden, Int num_scales) {
    const bool expert_rows = has_expert_rows(output.layout), quantises = quant != Quant::kNone;
    DispatchDims dims;
    if (output.layout == OutputLayout::kExpertMajor) {
      dims.rows = dims.rows.with(output.local_experts).with(capacity);
    } else if (output.layout == OutputLayout::kRankMajor) {
      dims.rows = dims.rows.with(output.num_ranks).with(output.max_tokens);
    } else {
      dims.rows = dims.rows.with(capacity);
    }
    dims.x = dims.rows.with(quantises ? quant_row_bytes(quant, hidden) : hidden);
    if (quantises) num_scales = num_quant_scales(quant, hidden);
    if (is_swizzled(quant)) {
      dims.scales = dims.rows;
      Int& rows = dims.scales.at[dims.scales.ndim - 1];
      rows = (rows + (kScaleTileRows - 1)) / kScaleTileRows;
      dims.scales = dims.scales.with((num_scales + (kScaleTileScales - 1)) / kScaleTileScales).with(kScaleTileBytes);
    } else if (num_scales != 0) {
      dims.scales = dims.rows.with(num_scales);
    }
    dims.weights = expert_rows ? dims.rows : dims.rows.with(output.topk);
    if (!expert_rows) dims.topk_idx = dims.weights;
    if (output.layout == OutputLayout::kPacked) dims.row_expert = dims.rows;
    dims.info = Dims<Int>{}.with(output.info_size());
    return dims;
  }
};

// ---- Parameters

// Of a combine in either mode, but for tensors.
template <class Params>
void set_combine(Params& p, const OutputShape& output, int num_experts, int num_tokens, const CombineOptions& options) {
  p.output = output;
  p.shape = {output.num_ranks, num_experts, output.topk, output.max_tokens};
  p.num_tokens = num_tokens;
  p.options = options;
}

// Without its counters.
inline RowSignals signals_of(const OutputShape& output, const CombineOptions& options, bool has_counters) {
  const int64_t rows_per_signal = options.rows_per_signal;
  const int threshold = options.signal_threshold;
  EP_CHECK(has_counters || (rows_per_signal == 0 && threshold == 0), "rows_per_signal is ", rows_per_signal,
           ", signal_threshold ", threshold, ", but there are no row_signals");
  if (!has_counters) return {};
  EP_CHECK(has_expert_rows(output.layout), "row_signals are for layouts of experts' rows, not for ",
           name_of(output.layout));
  EP_CHECK(rows_per_signal >= 1, "rows_per_signal is ", rows_per_signal, ", must be at least 1");
  EP_CHECK(threshold >= 1, "signal_threshold is ", threshold, ", must be from 1 to ", INT32_MAX);
  RowSignals signals;
  signals.is_packed = output.layout == OutputLayout::kPacked;
  signals.experts = signals.is_packed ? 1 : output.local_experts;
  signals.rows_per_expert = static_cast<int>(std::max<int64_t>(output.capacity, 1));
  signals.rows_per_signal = static_cast<int>(std::min<int64_t>(rows_per_signal, signals.rows_per_expert));
  signals.threshold = threshold;
  return signals;
}

// An extra tensor of low latency travels in the rows of x, as scales do, where x has none.
inline bool carries_extra(Quant quant, bool has_scales) { return quant == Quant::kNone && !has_scales; }

}  // namespace ep
