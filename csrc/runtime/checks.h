// Checks that both modes make of a call, and its record.
#pragma once

#include "base/check.h"
#include "layout/common/block_formats.h"
#include "layout/common/outputs.h"
#include "layout/common/shape.h"
#include "layout/common/wire.h"
#include "runtime/ll/params.h"

namespace ep {

constexpr int kMaxRowBytes = 65536;

inline int to_int(int64_t value, const char* name) {  // refuses what does not fit
  EP_CHECK(value >= INT32_MIN && value <= INT32_MAX, name, " is ", value, ", beyond 32 bits");
  return static_cast<int>(value);
}

inline void check_row_bytes(int64_t bytes, const char* what) {
  EP_CHECK(bytes > 0 && bytes % 16 == 0 && bytes <= kMaxRowBytes, what, " of ", bytes,
           " bytes: must be a multiple of 16 and at most ", kMaxRowBytes);
}

inline void check_tokens(int num_tokens, const Shape& shape) {
  EP_CHECK(num_tokens >= 0 && num_tokens <= shape.max_tokens, num_tokens, " tokens, but max_tokens is ",
           shape.max_tokens);
}

inline void check_quant(Quant quant, DType dtype, int hidden) {
  EP_CHECK(quant == Quant::kNone || dtype == DType::kBF16 || dtype == DType::kF16, "quant ", name_of(quant), " of ",
           name_of(dtype), ": only bf16 and fp16 are quantised");
  EP_CHECK(quant_scale_size(quant) != 1 || hidden % kMxBlock == 0, "quant ", name_of(quant), " of rows of ", hidden,
           " elements: must be a multiple of ", kMxBlock);
}

inline void check_scales(Quant quant, bool are_given) {
  EP_CHECK(quant == Quant::kNone || !are_given, "scales given together with quant ", name_of(quant),
           ", which makes its own: give one of the two");
}

inline void check_output(const OutputShape& output) {
  EP_CHECK(output.capacity >= 0 && output.capacity <= INT32_MAX, "capacity is ", output.capacity, ", must be 0 to ",
           INT32_MAX);
  EP_CHECK(output.alignment >= 1, "expert_alignment is ", output.alignment, ", must be at least 1");
  EP_CHECK(output.rows() <= INT32_MAX, "the output would have ", output.rows(), " rows, at most ", INT32_MAX);
}

// Rows are added up to their own type, 16-bit rows also to fp32. Sums travel in the output's type, in fp32, or, between
// rows and outputs of one 16-bit type, in a block format. These are the types that kernels are made for.
template <class Params>
void check_combined_types(const Params& p) {
  const DType in = p.dtype, wire = p.options.wire_dtype, out = p.options.out_dtype;
  const bool is_block = is_block_format(wire);
  EP_CHECK(in != DType::kF8E4M3, "combine adds up no ", name_of(in),
           " rows: they must be bf16, fp16 or fp32, as out.dequantized() makes them (C: times their scales)");
  EP_CHECK(is_float(in) && is_float(out) && (is_block || is_float(wire)), "combine adds up ", name_of(in), " rows to ",
           name_of(out), " over a ", name_of(wire), " wire: all three must be bf16, fp16 or fp32");
  EP_CHECK(!is_block || (in == out && out != DType::kF32), "combine adds up ", name_of(in), " rows to ", name_of(out),
           " over ", name_of(wire), ": rows and output must both be bf16, or both fp16");
  EP_CHECK(in == out || out == DType::kF32, "combine adds up ", name_of(in), " rows to ", name_of(out),
           ": the output must be of the rows' dtype, or fp32");
  EP_CHECK(is_block || wire == out || wire == DType::kF32, "a ", name_of(wire), " wire for ", name_of(out),
           " outputs: it must be of the same type or fp32");
}

// Of a combine that waits for row_signals.
inline void check_sms_beside_writer(const CombineOptions& options) {
  EP_CHECK(options.num_sms > 0, "num_sms is ", options.num_sms,
           ": with row_signals it must be positive, and leave SMs to the kernel that is waited for");
}

// What a combine of rows may ask for, in either mode.
template <class Params>
void check_combined_rows(const Params& p) {
  check_combined_types(p);
  check_row_bytes(static_cast<int64_t>(p.hidden) * size_of(p.dtype), "a row");
  check_row_bytes(static_cast<int64_t>(p.hidden) * size_of(p.options.out_dtype), "an output row");
  EP_CHECK(!is_block_format(p.options.wire_dtype) || p.hidden % 16 == 0, "rows of ", p.hidden, " elements over ",
           name_of(p.options.wire_dtype), ": must be a multiple of 16 elements");
  check_row_bytes(wire_row_bytes(p.options.wire_dtype, p.hidden), "a partial sum");
  EP_CHECK(p.options.weighting == Weighting::kNone || has_expert_rows(p.output.layout),
           "weights are given, but the rows of layout ", name_of(p.output.layout),
           " are already weighted by the caller: multiply the rows by their weights, and give none here");
  EP_CHECK((p.bias[0] == nullptr && p.bias[1] == nullptr) || p.output.layout == OutputLayout::kFlat,
           "biases go with layout flat, not with ", name_of(p.output.layout));
}

inline OpHeader header_of(uint32_t operation, int hidden, const Shape& shape, int scale_bytes, int num_tokens) {
  const auto word = [](int value) { return static_cast<uint32_t>(value); };
  return {{operation, word(hidden), word(shape.topk), word(shape.num_experts), word(shape.max_tokens),
           word(scale_bytes), word(num_tokens)}};
}

}  // namespace ep
