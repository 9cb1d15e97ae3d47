// Sums of rows on the host, with the roundings that docs/semantics.md fixes, for both modes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/common/rows.h"
#include "layout/common/dtype.h"

namespace ep {

using Floats = std::vector<float>;

// Starts from its first term, so that -0 stays -0; +0 of none.
class Sum {
 public:
  explicit Sum(int count) : values(count) {}

  void begin() {
    has_term_ = false;
    std::fill(values.begin(), values.end(), 0.0f);
  }
  void add(const Floats& term) {
    for (size_t i = 0; i < values.size(); i++) values[i] = has_term_ ? values[i] + term[i] : term[i];
    has_term_ = true;
  }
  void multiply(float factor) {
    for (float& value : values) value *= factor;
    has_term_ = true;
  }
  bool has_term() const { return has_term_; }

  Floats values;

 private:
  bool has_term_ = false;
};

inline const char* row_at(const void* base, int64_t row, int hidden, DType dtype) {
  return static_cast<const char*>(base) + row * hidden * size_of(dtype);
}

// What a token gets at home, in either mode: the biases and the terms that are added in between, rounded once. With a
// scale: the terms, times the scale, and then the biases.
template <class Params>
class HomeSum {
 public:
  explicit HomeSum(const Params& p) : terms(p.hidden), p_(p), bias_(p.hidden) {}

  void begin(int token) {
    terms.begin();
    if (p_.options.scale == 1.0f) add_biases(token);
  }
  void store(int token) {
    if (p_.options.scale != 1.0f) {
      terms.multiply(p_.options.scale);
      add_biases(token);
    }
    char* out = const_cast<char*>(row_at(p_.out, token, p_.hidden, p_.options.out_dtype));
    from_floats(p_.options.out_dtype, terms.values.data(), out, p_.hidden);
  }

  Sum terms;

 private:
  void add_biases(int token) {
    for (const void* bias : p_.bias) {
      if (bias == nullptr) continue;
      to_floats(p_.options.out_dtype, row_at(bias, token, p_.hidden, p_.options.out_dtype), bias_.data(), p_.hidden);
      terms.add(bias_);
    }
  }

  const Params& p_;
  Floats bias_;
};

}  // namespace ep
