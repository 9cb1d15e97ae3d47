// A piece of a row in a warp's registers, and how 16-bit numbers become e4m3 or e2m1.
//
// A row is cut into steps of 512 bytes, 16 a lane; a piece is kSteps of them. Beside each step may travel side words:
// the step's scales (FP8, MXFP8; four of them: NVFP4) or its key (opaque rows). Lane j holds the j-th side word of the
// piece.
#pragma once

#include "base/math.h"
#include "cuda/device/convert.cuh"
#include "layout/common/small_blocks.h"
#include "layout/common/wire.h"

namespace ep {

enum class Encoding : int { kFloat, kKeyed, kFp8, kMxFp8, kFp4 };

template <int kSteps, int kSides>
struct Piece {
  uint4 vector[kSteps];
  uint4 side;  // of kSides lanes
};
template <Encoding kEncoding, int kSteps>
inline constexpr int kSidesOf = kEncoding == Encoding::kFloat ? 0
                                : kEncoding == Encoding::kFp4 ? 4 * kSteps
                                                              : kSteps;
template <Encoding kEncoding, int kSteps>
using PieceOf = Piece<kSteps, kSidesOf<kEncoding, kSteps>>;

__device__ __forceinline__ uint32_t escaped(uint32_t word) { return min(word, kAbsent - 1); }
__device__ __forceinline__ uint4 escaped(uint4 v) {
  return make_uint4(escaped(v.x), escaped(v.y), escaped(v.z), escaped(v.w));
}
__device__ __forceinline__ bool has_arrived(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)) != kAbsent; }
__device__ __forceinline__ uint4 operator^(uint4 v, uint32_t key) {
  return make_uint4(v.x ^ key, v.y ^ key, v.z ^ key, v.w ^ key);
}

// Raw input of a piece: twice or four times as many vectors for rows that will be quantised.
template <Encoding kEncoding, int kSteps>
struct Raw {
  static constexpr bool kIsFp8 = kEncoding == Encoding::kFp8 || kEncoding == Encoding::kMxFp8;
  static constexpr int kPerVector = kIsFp8 ? 2 : kEncoding == Encoding::kFp4 ? 4 : 1;
  uint4 vector[kSteps * kPerVector];
};

// Two steps, of which a lane holds sixteen numbers each: the largest magnitudes of its groups there, in the halves of a
// word. `lanes` hold a group: eight one of 128, two one of 32. A magnitude of 16 bits stays one, so that both steps
// share the shuffles.
template <DType kType>
__device__ __forceinline__ uint32_t group_maxima(const uint4 (&raw)[4], int lanes) {
  uint32_t most[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const uint4 lo = raw[2 * j], hi = raw[2 * j + 1];
    const uint32_t first = max_magnitudes<kType>(max_magnitudes<kType>(lo.x, lo.y), max_magnitudes<kType>(lo.z, lo.w));
    const uint32_t last = max_magnitudes<kType>(max_magnitudes<kType>(hi.x, hi.y), max_magnitudes<kType>(hi.z, hi.w));
    most[j] = max_magnitudes<kType>(first, last);
  }
  uint32_t both = max_magnitudes<kType>(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) {
    if (offset < lanes) both = max_magnitudes<kType>(both, __shfl_xor_sync(~0u, both, offset));
  }
  return both;
}

// The scale of a group and the factor that its elements are multiplied with. The sign of `amax` means nothing.
__device__ __forceinline__ void group_scale(Quant quant, float amax, float& scale, float& factor) {
  const float a = fmaxf(fabsf(amax), 1e-4f);  // passes over NaN
  scale = __fmul_rn(a, 1.0f / 448.0f);
  factor = __fdiv_rn(448.0f, a);
  if (quant != Quant::kFp8) {
    const uint32_t bits = __float_as_uint(scale);
    const int exponent = min(static_cast<int>(bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0 ? 1 : 0), 127);
    scale = __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
    factor =
        exponent == 127 ? __uint_as_float(0x00400000u) : __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
  }
}

// Of MXFP8. The sign of `amax` means nothing, and NaN is 0.
__device__ __forceinline__ void mx_block_scale(float amax, uint32_t& scale, float& factor) {
  scale = mx_scale(__float_as_uint(fmaxf(fabsf(amax), 0.0f)));
  factor = __uint_as_float(mx_factor(scale));
}

// A lane's sixteen numbers of a step.
template <DType kType>
__device__ __forceinline__ uint4 scaled(uint4 lo, uint4 hi, float factor) {
  const uint32_t words[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 a = unpack2<kType>(words[2 * i]), b = unpack2<kType>(words[2 * i + 1]);
    packed[i] =
        pack_e4m3(__fmul_rn(a.x, factor), __fmul_rn(a.y, factor), __fmul_rn(b.x, factor), __fmul_rn(b.y, factor));
  }
  return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// The numbers times their factors, and the words of the scales to the lanes that hold side words.
template <DType kType>
__device__ __forceinline__ void set_piece(const uint4 (&raw)[4], const float (&factor)[2], const uint32_t (&scale)[2],
                                          Piece<2, 2>& piece, int lane) {
#pragma unroll
  for (int j = 0; j < 2; j++) piece.vector[j] = escaped(scaled<kType>(raw[2 * j], raw[2 * j + 1], factor[j]));
  const int step = lane & 1;
  const uint32_t bits = step == 0 ? scale[0] : scale[1];
  piece.side = make_uint4(__shfl_sync(~0u, bits, step), __shfl_sync(~0u, bits, step + 8),
                          __shfl_sync(~0u, bits, step + 16), __shfl_sync(~0u, bits, step + 24));
}

// Lanes past the row hold zeros.
template <DType kType>
__device__ __forceinline__ void quantize(Quant quant, const Raw<Encoding::kFp8, 2>& raw,
                                         PieceOf<Encoding::kFp8, 2>& piece, int lane) {
  const float2 maxima = unpack2<kType>(group_maxima<kType>(raw.vector, 8));
  float scale[2], factor[2];  // each lane all: what is shuffled comes later
  group_scale(quant, maxima.x, scale[0], factor[0]);
  group_scale(quant, maxima.y, scale[1], factor[1]);
  set_piece<kType>(raw.vector, factor, {__float_as_uint(scale[0]), __float_as_uint(scale[1])}, piece, lane);
}
template <DType kType>
__device__ __forceinline__ void quantize(const Raw<Encoding::kMxFp8, 2>& raw, PieceOf<Encoding::kMxFp8, 2>& piece,
                                         int lane) {
  const float2 maxima = unpack2<kType>(group_maxima<kType>(raw.vector, 2));
  float factor[2];
  uint32_t scale[2];
  mx_block_scale(maxima.x, scale[0], factor[0]);
  mx_block_scale(maxima.y, scale[1], factor[1]);
#pragma unroll
  for (uint32_t& byte : scale) {  // to the word of eight lanes
    byte <<= lane / 2 % 4 * 8;
    byte |= __shfl_xor_sync(~0u, byte, 2);
    byte |= __shfl_xor_sync(~0u, byte, 4);
  }
  set_piece<kType>(raw.vector, factor, scale, piece, lane);
}

// Scales of groups past the row are zeros, those of MXFP8 by themselves; UE8M0 packs the exponents of a step into one
// word.
__device__ __forceinline__ uint4 finish_scales(Quant quant, uint4 scales, int step, int hidden) {
  const int groups = ceil_div(hidden, kQuantGroup) - 4 * step;
  if (groups < 2) scales.y = 0;
  if (groups < 3) scales.z = 0;
  if (groups < 4) scales.w = 0;
  if (quant != Quant::kFp8Ue8m0) return escaped(scales);
  return make_uint4(scales.x >> 23 | scales.y >> 23 << 8 | scales.z >> 23 << 16 | scales.w >> 23 << 24, 0, 0, 0);
}

// ---- NVFP4. A lane holds two blocks of a step: 16 numbers each.

// A block of raw words: its scale, and its codes in two words.
template <DType kType>
__device__ __forceinline__ uint32_t nvfp4_block(uint4 lo, uint4 hi, float tensor_scale, uint32_t& first,
                                                uint32_t& second) {
  const uint32_t words[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
  uint32_t most = 0;  // magnitudes as integers, so that NaN is the largest
#pragma unroll
  for (uint32_t word : words) most = max_halves(most, word & 0x7FFF7FFFu);
  const float2 both = unpack2<kType>(max_halves(most, most >> 16));
  const float wanted = __fmul_rn(tensor_scale, __fmul_rn(both.x, 1.0f / 6.0f));
  const uint32_t scale = pack_e4m3(wanted, 0, 0, 0) & 0xFF;
  const float rounded = unpack2_e4m3(scale).x;
  const float factor = rounded > 0 ? __fdiv_rn(1.0f, __fmul_rn(rounded, __fdiv_rn(1.0f, tensor_scale))) : 0.0f;
  uint32_t codes[2];
#pragma unroll
  for (int w = 0; w < 2; w++) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = unpack2<kType>(words[4 * w + i]);
      values[2 * i] = __fmul_rn(pair.x, factor);
      values[2 * i + 1] = __fmul_rn(pair.y, factor);
    }
    codes[w] = pack_e2m1(values);
  }
  first = codes[0];
  second = codes[1];
  return scale;
}

// Lanes past the row hold zeros.
template <DType kType>
__device__ __forceinline__ void quantize(float tensor_scale, const Raw<Encoding::kFp4, 1>& raw,
                                         PieceOf<Encoding::kFp4, 1>& piece, int lane) {
  uint32_t words[4], scales[2];
#pragma unroll
  for (int b = 0; b < 2; b++) {
    scales[b] =
        nvfp4_block<kType>(raw.vector[2 * b], raw.vector[2 * b + 1], tensor_scale, words[2 * b], words[2 * b + 1]);
    if (escape_block(words[2 * b], words[2 * b + 1])) scales[b] |= kEscapedScale;
  }
  piece.vector[0] = make_uint4(words[0], words[1], words[2], words[3]);
  const uint32_t own = scales[0] | scales[1] << 8;
  const uint32_t word = own | __shfl_xor_sync(~0u, own, 1) << 16;  // of even lanes
  const int from = lane % 4 * 8;
  piece.side = make_uint4(__shfl_sync(~0u, word, from), __shfl_sync(~0u, word, from + 2),
                          __shfl_sync(~0u, word, from + 4), __shfl_sync(~0u, word, from + 6));
}

// Blocks as they are, and their scales. A warp calls, whose lanes without a side word hold zeros there.
__device__ __forceinline__ void unescape(PieceOf<Encoding::kFp4, 1>& piece, int lane) {
  constexpr uint32_t kMarks = kEscapedScale * 0x01010101u;
  uint4& side = piece.side;
  if (!__any_sync(~0u, ((side.x | side.y | side.z | side.w) & kMarks) != 0)) return;
  const int from = lane / 8;
  const uint32_t words[4] = {__shfl_sync(~0u, side.x, from), __shfl_sync(~0u, side.y, from),
                             __shfl_sync(~0u, side.z, from), __shfl_sync(~0u, side.w, from)};
  const int at = lane % 8 / 2;
  const uint32_t word = at == 0 ? words[0] : at == 1 ? words[1] : at == 2 ? words[2] : words[3];
  const uint32_t own = word >> lane % 2 * 16;
  uint4& v = piece.vector[0];
  if ((own & kEscapedScale) != 0) unescape_block(v.x, v.y);
  if ((own >> 8 & kEscapedScale) != 0) unescape_block(v.z, v.w);
  side = make_uint4(side.x & ~kMarks, side.y & ~kMarks, side.z & ~kMarks, side.w & ~kMarks);
}

}  // namespace ep
