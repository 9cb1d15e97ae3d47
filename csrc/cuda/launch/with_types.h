// From a combine's types, which are values, to template arguments.
#pragma once

#include <type_traits>

#include "layout/common/block_formats.h"
#include "runtime/ll/params.h"

namespace ep {

template <DType kIn, DType kWire, DType kOut>
struct Types {
  static constexpr DType in = kIn, wire = kWire, out = kOut;
};

template <class Body>
void with_dtype(DType dtype, Body body) {
  if (dtype == DType::kBF16) return body(std::integral_constant<DType, DType::kBF16>{});
  if (dtype == DType::kF16) return body(std::integral_constant<DType, DType::kF16>{});
  return body(std::integral_constant<DType, DType::kF32>{});
}

template <class Body>
void with_block_types(DType in, DType wire, Body body) {
  const auto with_format = [&](auto constant) {
    constexpr DType kIn = decltype(constant)::value;
    if (wire == DType::kLogFmt) return body(Types<kIn, DType::kLogFmt, kIn>{});
    return body(Types<kIn, DType::kFp8Blocks, kIn>{});
  };
  if (in == DType::kF16) return with_format(std::integral_constant<DType, DType::kF16>{});
  return with_format(std::integral_constant<DType, DType::kBF16>{});
}

// Calls body with the types as compile-time constants. The wire is the output's type, or fp32.
template <class Body>
void with_plain_types(DType in, DType wire, DType out, Body body) {
  with_dtype(in, [&](auto in_constant) {
    with_dtype(out, [&](auto out_constant) {
      constexpr DType kIn = decltype(in_constant)::value, kOut = decltype(out_constant)::value;
      if (wire == DType::kF32) return body(Types<kIn, DType::kF32, kOut>{});
      return body(Types<kIn, kOut, kOut>{});
    });
  });
}

// The same, or a block format: rows and output are of one 16-bit type then.
template <class Body>
void with_types(DType in, DType wire, DType out, Body body) {
  if (is_block_format(wire)) return with_block_types(in, wire, body);
  with_plain_types(in, wire, out, body);
}

// Calls body for every combination of plain types.
template <class Body>
void for_plain_types(Body body) {
  for (DType in : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (DType out : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (DType wire : {out, DType::kF32}) with_plain_types(in, wire, out, body);
    }
  }
}

// Calls body for every combination that kernels are made for.
template <class Body>
void for_all_types(Body body) {
  for_plain_types(body);
  for (DType in : {DType::kBF16, DType::kF16}) {
    for (DType wire : {DType::kFp8Blocks, DType::kLogFmt}) with_types(in, wire, in, body);
  }
}

// Of a world on one GPU, whose ranks share a launch: the parameters of rank 0, and of `rank`.
inline void check_same_kernel(const LlCombineParams& first, const LlCombineParams& other, int rank) {
  EP_CHECK((other.options.weighting == Weighting::kHome) == (first.options.weighting == Weighting::kHome),
           "of ranks 0 and ", rank, " one gives its weights at combine: in a world on one GPU all must, or none");
  EP_CHECK(other.sends_unweighted == first.sends_unweighted, "of ranks 0 and ", rank,
           " one splits its combine: in a world on one GPU all must, or none");
}

}  // namespace ep
