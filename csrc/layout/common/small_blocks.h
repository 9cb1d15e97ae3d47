// MXFP8 and NVFP4: rows in blocks of 32 or 16 elements, whose scales are bytes. The rules are arithmetic of integers,
// so that every backend gets the same bits; docs/semantics.md has them as formulas.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "base/platform.h"
#include "layout/common/wire.h"

namespace ep {

// ---- MXFP8. `amax`: bits of a block's largest magnitude in fp32, never NaN.

// The biased exponent of the least power of two that takes it to 448 at most; 0 of zeros, 254 of infinity.
EP_HD uint32_t mx_scale(uint32_t amax) {
  constexpr uint32_t kInfinity = 0x7F800000u, kOf448 = 8, kMantissaOf448 = 0x600000u;
  if (amax >= kInfinity) return 254;
  const uint32_t exponent = (amax >> 23) + ((amax & 0x7FFFFF) > kMantissaOf448 ? 1 : 0);
  return exponent > kOf448 ? exponent - kOf448 : 0;
}
// Bits of what elements are multiplied by: its reciprocal, 1 for scale 0, whose elements are all too small.
EP_HD uint32_t mx_factor(uint32_t scale) {
  if (scale == 0) return 0x3F800000u;
  return scale == 254 ? 0x00400000u : (254 - scale) << 23;
}

// ---- NVFP4

// The code of an fp32 number as e2m1: to nearest, ties to even, at most 6, with its sign in bit 3; 0 of NaN.
EP_HD uint32_t e2m1_of(uint32_t bits) {
  const uint32_t sign = bits >> 28 & 8, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0;
  if (magnitude < 0x3F800000u) return sign | ((magnitude > 0x3E800000u ? 1 : 0) + (magnitude >= 0x3F400000u ? 1 : 0));
  const uint32_t rounded = (magnitude + 0x1FFFFF + (magnitude >> 22 & 1)) >> 22;  // exponent and one bit of mantissa
  return sign | (rounded < 0xFC + 7 ? rounded - 0xFC : 7);
}

// A block on its way in words that announce themselves (wire.h): any word may be all ones, but no scale is negative.
// So the sign of the scale says that a word was, and the first word then says which.
constexpr uint32_t kEscapedScale = 0x80;
EP_HD bool escape_block(uint32_t& first, uint32_t& second) {
  const bool is_first = first == kAbsent, is_second = second == kAbsent;
  if (!is_first && !is_second) return false;
  const uint32_t other = is_first ? second : first;
  first = is_first && is_second ? 2 : is_second ? 1 : 0;
  second = first == 2 ? 0 : other;
  return true;
}
EP_HD void unescape_block(uint32_t& first, uint32_t& second) {
  const uint32_t which = first, other = second;
  first = which == 1 ? other : kAbsent;
  second = which == 0 ? other : kAbsent;
}

// ---- Scales as the GEMMs of cuBLAS and CUTLASS read them: tiles of 128 rows and 4 scales, 512 bytes each, one after
// the other along a row. In a tile a row's four scales lie together, those of rows r, r + 32, r + 64, r + 96 behind one
// another.
constexpr int kScaleTileRows = 128, kScaleTileScales = 4, kScaleTileBytes = 512;

// Byte of the four scales from 4 * word on of a row. `words`: of a row.
EP_HD int64_t swizzled_word(int64_t row, int word, int words) {
  const int in_tile = static_cast<int>(row % kScaleTileRows);
  return (row / kScaleTileRows * words + word) * kScaleTileBytes + in_tile % 32 * 16 + in_tile / 32 * 4;
}

}  // namespace ep
