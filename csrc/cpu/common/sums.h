// Sums of rows on the host, with the roundings that docs/semantics.md fixes, for both modes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "layout/common/dtype.h"

namespace ep {

using Floats = std::vector<float>;

// Adds `row` to `sum`, or begins with it: a sum starts from its first term, so that -0 stays -0.
inline void add(Floats& sum, const Floats& row, bool& has_term) {
  for (size_t i = 0; i < sum.size(); i++) sum[i] = has_term ? sum[i] + row[i] : row[i];
  has_term = true;
}

inline const char* row_at(const void* base, int64_t row, int hidden, DType dtype) {
  return static_cast<const char*>(base) + row * hidden * size_of(dtype);
}

}  // namespace ep
