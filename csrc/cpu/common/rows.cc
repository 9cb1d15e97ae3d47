#include "cpu/common/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/convert.h"

namespace ep {
namespace {

constexpr float kE4m3Max = 448.0f;
constexpr float kSmallestAmax = 1e-4f;

uint32_t largest_key(int words) { return static_cast<uint32_t>(words); }  // words + 1 candidates suffice

uint32_t find_key(const uint32_t* words, int count) {
  for (uint32_t key = 0; key <= largest_key(count); key++) {
    if (std::none_of(words, words + count, [key](uint32_t word) { return keyed(word, key) == kAbsent; })) return key;
  }
  return 0;  // not reached: count words cannot exclude count + 1 keys
}

// The exponent of the smallest power of two that is not below `value`; NaN elements never reach here.
int ceil_log2(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int exponent = static_cast<int>(bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0 ? 1 : 0);
  return std::clamp(exponent, -126, 127);
}

float power_of_two(int exponent) {  // -127 is a subnormal
  return exponent == -127 ? 0x1p-127f : std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

}  // namespace

void to_floats(DType dtype, const void* values, float* floats, int count) {
  const auto* halves = static_cast<const uint16_t*>(values);
  switch (dtype) {
    case DType::kBF16:
      for (int i = 0; i < count; i++) floats[i] = bf16_to_float(halves[i]);
      break;
    case DType::kF16:
      for (int i = 0; i < count; i++) floats[i] = f16_to_float(halves[i]);
      break;
    default:
      std::memcpy(floats, values, count * sizeof(float));
  }
}

void from_floats(DType dtype, const float* floats, void* values, int count) {
  auto* halves = static_cast<uint16_t*>(values);
  switch (dtype) {
    case DType::kBF16:
      for (int i = 0; i < count; i++) halves[i] = float_to_bf16(floats[i]);
      break;
    case DType::kF16:
      for (int i = 0; i < count; i++) halves[i] = float_to_f16(floats[i]);
      break;
    default:
      std::memcpy(values, floats, count * sizeof(float));
  }
}

void quantize_row(Quant quant, const float* row, int hidden, uint8_t* payload, void* scales) {
  const int groups = ceil_div(hidden, kQuantGroup);
  auto* float_scales = static_cast<float*>(scales);
  auto* exponents = static_cast<uint8_t*>(scales);
  std::memset(scales, 0, quant_scale_bytes(quant, hidden));
  for (int group = 0; group < groups; group++) {
    const int begin = group * kQuantGroup, end = std::min(begin + kQuantGroup, hidden);
    float amax = kSmallestAmax;
    for (int i = begin; i < end; i++) {
      const float magnitude = std::fabs(row[i]);
      if (magnitude > amax) amax = magnitude;  // never true of a NaN; fmax would return a signalling one
    }
    float scale = amax * (1.0f / kE4m3Max);
    float factor = kE4m3Max / amax;
    if (quant != Quant::kFp8) {
      const int exponent = ceil_log2(scale);
      scale = power_of_two(exponent);
      factor = power_of_two(-exponent);
      if (quant == Quant::kFp8Ue8m0) exponents[group] = static_cast<uint8_t>(exponent + 127);
    }
    if (quant != Quant::kFp8Ue8m0) float_scales[group] = scale;
    for (int i = begin; i < end; i++) payload[i] = float_to_e4m3(row[i] * factor);
  }
}

void encode_row(const RowFormat& format, uint32_t* words) {
  const int body_words = format.body_bytes() / 4;
  if (!format.is_keyed) {
    for (int i = 0; i < body_words; i++) words[i] = escape_float(words[i]);
    return;
  }
  uint32_t* keys = words + format.keys_offset() / 4;
  std::fill(keys, words + format.wire_bytes() / 4, 0);
  for (int block = 0; block < format.num_keys(); block++) {
    uint32_t* begin = words + block * kKeyBlockWords;
    const int count = std::min(kKeyBlockWords, body_words - block * kKeyBlockWords);
    keys[block] = find_key(begin, count);
    for (int i = 0; i < count; i++) begin[i] = keyed(begin[i], keys[block]);
  }
}

void decode_row(const RowFormat& format, uint32_t* words) {
  if (!format.is_keyed) return;
  const uint32_t* keys = words + format.keys_offset() / 4;
  for (int i = 0; i < format.body_bytes() / 4; i++) words[i] = keyed(words[i], keys[i / kKeyBlockWords]);
}

}  // namespace ep
