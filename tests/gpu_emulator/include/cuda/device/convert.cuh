// In place of the hardware's conversions: those of the CPU backend.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>

#include "base/convert.h"
#include "layout/common/dtype.h"
#include "layout/common/small_blocks.h"

namespace ep {

template <DType kType>
float2 unpack2(uint32_t word) {
  const auto low = static_cast<uint16_t>(word), high = static_cast<uint16_t>(word >> 16);
  if constexpr (kType == DType::kBF16) return {bf16_to_float(low), bf16_to_float(high)};
  return {f16_to_float(low), f16_to_float(high)};
}
template <DType kType>
uint32_t pack2(float a, float b) {
  if constexpr (kType == DType::kBF16) return float_to_bf16(a) | static_cast<uint32_t>(float_to_bf16(b)) << 16;
  return float_to_f16(a) | static_cast<uint32_t>(float_to_f16(b)) << 16;
}
// Magnitudes are ordered as their bits are, NaN apart. The sign is what max.xorsign gives: of no use.
template <DType kType>
uint32_t max_magnitudes(uint32_t a, uint32_t b) {
  constexpr uint32_t kInfinity = kType == DType::kBF16 ? 0x7F80 : 0x7C00;
  const auto larger = [](uint32_t x, uint32_t y) -> uint32_t {
    x &= 0x7FFF, y &= 0x7FFF;
    if (x > kInfinity) return y > kInfinity ? 0x7FFF : y;
    return y > kInfinity || x > y ? x : y;
  };
  return larger(a & 0xFFFF, b & 0xFFFF) | larger(a >> 16, b >> 16) << 16 | ((a ^ b) & 0x80008000u);
}
inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  return float_to_e4m3(a) | static_cast<uint32_t>(float_to_e4m3(b)) << 8 |
         static_cast<uint32_t>(float_to_e4m3(c)) << 16 | static_cast<uint32_t>(float_to_e4m3(d)) << 24;
}
inline uint32_t max_halves(uint32_t a, uint32_t b) {
  return std::max(a & 0xFFFFu, b & 0xFFFFu) | std::max(a >> 16, b >> 16) << 16;
}
inline uint32_t pack_e2m1(const float (&values)[8]) {
  uint32_t word = 0;
  for (int i = 0; i < 8; i++) word |= e2m1_of(std::bit_cast<uint32_t>(values[i])) << (4 * i);
  return word;
}
inline float2 unpack2_e4m3(uint32_t bytes) {
  return {e4m3_to_float(static_cast<uint8_t>(bytes)), e4m3_to_float(static_cast<uint8_t>(bytes >> 8))};
}

}  // namespace ep
