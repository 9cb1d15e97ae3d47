// Integer arithmetic of layouts.
#pragma once

#include <bit>
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

// Division by a number that is known before the kernel starts, for dividends below 2^31: three instructions instead of
// forty. Granlund and Montgomery, Division by Invariant Integers using Multiplication (1994).
struct Divisor {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  static Divisor of(int divisor) {
    Divisor d;
    d.divisor = static_cast<uint32_t>(divisor);
    d.shift = std::bit_width(d.divisor - 1);
    const uint64_t rest = (1ull << d.shift) - d.divisor;
    d.multiplier = static_cast<uint32_t>((rest << 32) / d.divisor + 1);
    return d;
  }
  EP_HD int divide(int dividend) const {
    const auto n = static_cast<uint32_t>(dividend);
#if defined(__CUDA_ARCH__)
    const uint32_t high = __umulhi(n, multiplier);
#else
    const auto high = static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> 32);
#endif
    return static_cast<int>((high + n) >> shift);
  }
  EP_HD int remainder(int dividend, int quotient) const { return dividend - quotient * static_cast<int>(divisor); }
};

}  // namespace ep
