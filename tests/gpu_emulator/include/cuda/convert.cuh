// In place of the hardware's conversions: those of the CPU backend.
#pragma once

#include <cuda_runtime.h>

#include "base/convert.h"
#include "layout/dtype.h"

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
inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  return float_to_e4m3(a) | static_cast<uint32_t>(float_to_e4m3(b)) << 8 |
         static_cast<uint32_t>(float_to_e4m3(c)) << 16 | static_cast<uint32_t>(float_to_e4m3(d)) << 24;
}

}  // namespace ep
