// A piece of a row in a warp's registers, and how 16-bit numbers become e4m3.
//
// A row is cut into steps of 512 bytes, 16 a lane; a piece is kSteps of them. Beside each step may travel a side word:
// the step's scales (FP8) or its key (opaque rows). Lane j holds the side word of the piece's step j.
#pragma once

#include "base/math.h"
#include "cuda/device/convert.cuh"
#include "layout/common/wire.h"

namespace ep {

enum class Encoding : int { kFloat, kKeyed, kFp8 };

template <int kSteps, bool kHasSide>
struct Piece {
  uint4 vector[kSteps];
  uint4 side;  // if the payload has side words
};
template <Encoding kEncoding, int kSteps>
using PieceOf = Piece<kSteps, kEncoding != Encoding::kFloat>;

__device__ __forceinline__ uint32_t escaped(uint32_t word) { return min(word, kAbsent - 1); }
__device__ __forceinline__ uint4 escaped(uint4 v) {
  return make_uint4(escaped(v.x), escaped(v.y), escaped(v.z), escaped(v.w));
}
__device__ __forceinline__ bool has_arrived(uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)) != kAbsent; }
__device__ __forceinline__ uint4 operator^(uint4 v, uint32_t key) {
  return make_uint4(v.x ^ key, v.y ^ key, v.z ^ key, v.w ^ key);
}

// Raw input of a piece: twice as many vectors for rows that will be quantised.
template <Encoding kEncoding, int kSteps>
struct Raw {
  static constexpr int kPerVector = kEncoding == Encoding::kFp8 ? 2 : 1;
  uint4 vector[kSteps * kPerVector];
};

// Two steps, of which a lane holds sixteen numbers each: the largest magnitudes of its groups there, in the halves of a
// word. Eight lanes hold a group of 128; a magnitude of 16 bits stays one, so that both steps share the shuffles.
template <DType kType>
__device__ __forceinline__ uint32_t group_maxima(const uint4 (&raw)[4]) {
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
    both = max_magnitudes<kType>(both, __shfl_xor_sync(~0u, both, offset));
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

// Lanes past the row hold zeros.
template <DType kType>
__device__ __forceinline__ void quantize(Quant quant, const Raw<Encoding::kFp8, 2>& raw,
                                         PieceOf<Encoding::kFp8, 2>& piece, int lane) {
  const float2 maxima = unpack2<kType>(group_maxima<kType>(raw.vector));
  float scale[2], factor[2];  // each lane all: what is shuffled comes later
  group_scale(quant, maxima.x, scale[0], factor[0]);
  group_scale(quant, maxima.y, scale[1], factor[1]);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    piece.vector[j] = escaped(scaled<kType>(raw.vector[2 * j], raw.vector[2 * j + 1], factor[j]));
  }
  const int step = lane & 1;
  const uint32_t bits = __float_as_uint(step == 0 ? scale[0] : scale[1]);
  piece.side = make_uint4(__shfl_sync(~0u, bits, step), __shfl_sync(~0u, bits, step + 8),
                          __shfl_sync(~0u, bits, step + 16), __shfl_sync(~0u, bits, step + 24));
}

// Scales of groups past the row are zeros; UE8M0 packs the exponents of a step into one word.
__device__ __forceinline__ uint4 finish_scales(Quant quant, uint4 scales, int step, int hidden) {
  const int groups = ceil_div(hidden, kQuantGroup) - 4 * step;
  if (groups < 2) scales.y = 0;
  if (groups < 3) scales.z = 0;
  if (groups < 4) scales.w = 0;
  if (quant != Quant::kFp8Ue8m0) return escaped(scales);
  return make_uint4(scales.x >> 23 | scales.y >> 23 << 8 | scales.z >> 23 << 16 | scales.w >> 23 << 24, 0, 0, 0);
}

}  // namespace ep
