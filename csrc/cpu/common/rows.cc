#include "cpu/common/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/convert.h"
#include "layout/common/small_blocks.h"

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

// ---- Block formats

void fp8_to_floats(const char* row, float* floats, int count) {
  for (int i = 0; i < count; i++) {
    float scale;
    std::memcpy(&scale, row + block_headers_offset(DType::kFp8Blocks, count) + i / kBlockElements * 4, 4);
    floats[i] = e4m3_to_float(static_cast<uint8_t>(row[i])) * scale;
  }
}

void floats_to_fp8(const float* floats, char* row, int count) {
  quantize_row(Quant::kFp8, floats, count, reinterpret_cast<uint8_t*>(row),
               row + block_headers_offset(DType::kFp8Blocks, count));
}

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// The header of a block of LogFMT.
uint32_t log_header(const float* block, int count) {
  uint32_t least = logfmt::kEnd, most = 0;
  for (int i = 0; i < count; i++) {
    if (!logfmt::is_finite(bits_of(block[i]))) return logfmt::kNotFinite;
    const uint32_t log = logfmt::log_of(bits_of(block[i]));
    if (log != 0) least = std::min(least, log);
    most = std::max(most, log);
  }
  return logfmt::Scale::of(least, most).header();
}

void floats_to_logfmt(const float* floats, char* row, int count) {
  char* headers = row + block_headers_offset(DType::kLogFmt, count);
  for (int first = 0; first < count; first += kBlockElements) {
    const int size = std::min(kBlockElements, count - first);
    const uint32_t header = log_header(floats + first, size);
    std::memcpy(headers + first / kBlockElements * 4, &header, 4);
    const auto scale = logfmt::Scale::of_header(header);
    const uint32_t inverse = 0xFFFFFFFFu / scale.step;
    for (int i = first; i < first + size; i += kEight) {
      uint32_t codes[kEight] = {};
      for (int j = 0; j < kEight && header != logfmt::kNotFinite; j++) {
        codes[j] = logfmt::code_of(logfmt::signed_log_of(bits_of(floats[i + j])), scale, inverse);
      }
      const auto eight = logfmt::Eight::pack(codes);
      const auto half = static_cast<uint16_t>(eight.half);
      std::memcpy(row + i, eight.words, 8);
      std::memcpy(row + block_halves_offset(count) + i / kEight * 2, &half, 2);
    }
  }
}

void logfmt_to_floats(const char* row, float* floats, int count) {
  for (int i = 0; i < count; i += kEight) {
    uint32_t header;
    uint16_t half;
    std::memcpy(&header, row + block_headers_offset(DType::kLogFmt, count) + i / kBlockElements * 4, 4);
    std::memcpy(&half, row + block_halves_offset(count) + i / kEight * 2, 2);
    logfmt::Eight eight{{}, half};
    std::memcpy(eight.words, row + i, 8);
    const auto scale = logfmt::Scale::of_header(header);
    for (int j = 0; j < kEight; j++) {
      const bool is_finite = header != logfmt::kNotFinite;
      floats[i + j] = std::bit_cast<float>(is_finite ? logfmt::number_of(eight.code(j), scale) : logfmt::kNaN);
    }
  }
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
    case DType::kFp8Blocks:
      return fp8_to_floats(static_cast<const char*>(values), floats, count);
    case DType::kLogFmt:
      return logfmt_to_floats(static_cast<const char*>(values), floats, count);
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
    case DType::kFp8Blocks:
      return floats_to_fp8(floats, static_cast<char*>(values), count);
    case DType::kLogFmt:
      return floats_to_logfmt(floats, static_cast<char*>(values), count);
    default:
      std::memcpy(values, floats, count * sizeof(float));
  }
}

namespace {

void quantize_mxfp8(const float* row, int hidden, uint8_t* payload, uint8_t* scales) {
  for (int block = 0; block < hidden / kMxBlock; block++) {
    const float* from = row + block * kMxBlock;
    float amax = 0;
    for (int i = 0; i < kMxBlock; i++) {
      if (std::fabs(from[i]) > amax) amax = std::fabs(from[i]);  // never true of a NaN
    }
    const uint32_t scale = mx_scale(bits_of(amax));
    const float factor = std::bit_cast<float>(mx_factor(scale));
    scales[block] = static_cast<uint8_t>(scale);
    for (int i = 0; i < kMxBlock; i++) payload[block * kMxBlock + i] = float_to_e4m3(from[i] * factor);
  }
}

void quantize_nvfp4(const float* row, int hidden, uint8_t* payload, uint8_t* scales, float tensor_scale) {
  for (int block = 0; block < hidden / kNvfp4Block; block++) {
    const float* from = row + block * kNvfp4Block;
    uint32_t most = 0;  // as an integer, so that NaN is the largest
    for (int i = 0; i < kNvfp4Block; i++) most = std::max(most, bits_of(from[i]) & 0x7FFFFFFFu);
    const float wanted = tensor_scale * (std::bit_cast<float>(most) * (1.0f / 6.0f));
    scales[block] = float_to_e4m3(wanted);
    const float scale = e4m3_to_float(scales[block]);
    const float factor = scale > 0 ? 1.0f / (scale * (1.0f / tensor_scale)) : 0.0f;
    const auto code = [&](int i) { return e2m1_of(bits_of(from[i] * factor)); };
    for (int i = 0; i < kNvfp4Block; i += 2) {
      payload[(block * kNvfp4Block + i) / 2] = static_cast<uint8_t>(code(i) | code(i + 1) << 4);
    }
  }
}

}  // namespace

void escape_nvfp4(uint32_t* payload, uint8_t* scales, int blocks) {
  for (int i = 0; i < blocks; i++) {
    if (escape_block(payload[2 * i], payload[2 * i + 1])) scales[i] |= kEscapedScale;
  }
}
void unescape_nvfp4(uint32_t* payload, uint8_t* scales, int blocks) {
  for (int i = 0; i < blocks; i++) {
    if ((scales[i] & kEscapedScale) == 0) continue;
    unescape_block(payload[2 * i], payload[2 * i + 1]);
    scales[i] &= ~kEscapedScale;
  }
}

void quantize_row(Quant quant, const float* row, int hidden, uint8_t* payload, void* scales, float tensor_scale) {
  if (is_mxfp8(quant)) return quantize_mxfp8(row, hidden, payload, static_cast<uint8_t*>(scales));
  if (is_nvfp4(quant)) return quantize_nvfp4(row, hidden, payload, static_cast<uint8_t*>(scales), tensor_scale);
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
