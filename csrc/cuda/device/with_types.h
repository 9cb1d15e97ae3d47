// From a combine's types, which are values, to template arguments.
#pragma once

#include <type_traits>

#include "base/check.h"
#include "layout/common/dtype.h"

namespace ep {

template <DType kIn, DType kWire, DType kOut>
struct Types {
  static constexpr DType in = kIn, wire = kWire, out = kOut;
};

// The combinations that kernels are made for: check_combined_types() (runtime/checks.h) refuses all others.
template <DType kType, class Body>
void for_types_of(Body body) {
  if constexpr (kType != DType::kF32) {
    body(Types<kType, kType, kType>{});
    body(Types<kType, DType::kF32, kType>{});
    body(Types<kType, DType::kFp8Blocks, kType>{});
    body(Types<kType, DType::kLogFmt, kType>{});
  }
  body(Types<kType, DType::kF32, DType::kF32>{});
}

template <class Body>
void for_all_types(Body body) {
  for_types_of<DType::kBF16>(body);
  for_types_of<DType::kF16>(body);
  for_types_of<DType::kF32>(body);
}

// Calls body with the types as compile-time constants.
template <class Body>
void with_types(DType in, DType wire, DType out, Body body) {
  bool is_known = false;
  for_all_types([&](auto types) {
    using T = decltype(types);
    if (T::in != in || T::wire != wire || T::out != out) return;
    is_known = true;
    body(types);
  });
  EP_CHECK(is_known, "no kernel adds up ", name_of(in), " rows to ", name_of(out), " over ", name_of(wire));
}

// Of kernels whose rows, sums and outputs are of one type.
template <class Body>
void for_all_row_types(Body body) {
  body(std::integral_constant<DType, DType::kBF16>{});
  body(std::integral_constant<DType, DType::kF16>{});
  body(std::integral_constant<DType, DType::kF32>{});
}
template <class Body>
void with_row_type(DType given, Body body) {
  for_all_row_types([&](auto type) {
    if (type() == given) body(type);
  });
}

}  // namespace ep
