// Integer arithmetic of layouts.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace ep {

template <class T>
EP_HD constexpr T ceil_div(T value, T divisor) {
  return (value + divisor - 1) / divisor;
}

template <class T>
EP_HD constexpr T align_up(T value, T alignment) {
  return ceil_div(value, alignment) * alignment;
}

}  // namespace ep
