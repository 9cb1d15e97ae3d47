// Small floating-point formats as lists of values, and rounding as a search for the nearest: slow, but it shares
// nothing with the library's bit arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace ep {

class NumberList {
 public:
  // All non-negative finite values; `max` the largest. `has_infinity`: what rounds past it becomes infinite, else
  // `max`.
  NumberList(int mantissa_bits, int smallest_exponent, double max, bool has_infinity) : has_infinity_(has_infinity) {
    const int steps = 1 << mantissa_bits;
    for (int code = 0;; code++) {
      const int exponent = code / steps, mantissa = code % steps;
      const double value = exponent == 0
                               ? std::ldexp(mantissa, smallest_exponent - mantissa_bits)
                               : std::ldexp(steps + mantissa, smallest_exponent + exponent - 1 - mantissa_bits);
      values_.push_back(value);
      if (value > max) break;  // the first that does not exist serves to round up to
    }
  }

  int num_finite() const { return static_cast<int>(values_.size()) - 1; }
  double value(int code) const { return values_[code]; }

  // The code of |value|; one past the finite codes is infinity. Not for NaN.
  int nearest(double value) const {
    const double magnitude = std::fabs(value);
    const int above = static_cast<int>(std::lower_bound(values_.begin(), values_.end(), magnitude) - values_.begin());
    int code = above;
    if (above == static_cast<int>(values_.size())) {
      code = num_finite();
    } else if (above > 0) {
      const double to_below = magnitude - values_[above - 1], to_above = values_[above] - magnitude;
      const bool takes_below = to_below < to_above || (to_below == to_above && (above - 1) % 2 == 0);
      code = takes_below ? above - 1 : above;
    }
    return has_infinity_ || code < num_finite() ? code : num_finite() - 1;
  }

 private:
  std::vector<double> values_;
  const bool has_infinity_;
};

inline const NumberList& bf16_numbers() {
  static const NumberList list(7, -126, std::ldexp(255.0, 120), true);
  return list;
}
inline const NumberList& f16_numbers() {
  static const NumberList list(10, -14, 65504.0, true);
  return list;
}
inline const NumberList& e4m3_numbers() {
  static const NumberList list(3, -6, 448.0, false);
  return list;
}

}  // namespace ep
