// What a lane holds of a row that travels in a block format (layout/common/block_formats.h): eight numbers, in words as
// they travel. Sixteen lanes hold a block, and each its header; two lanes share a word of LogFMT's halves.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/device/numbers.cuh"
#include "layout/common/block_formats.h"

namespace ep {

// The place of a lane in a row, from which follows where the words lie that it shares with others. The first of those
// lanes stores them.
template <DType kFormat>
struct BlockPlace {
  int hidden, lane_index;

  // From the lane's first 8 bytes.
  __device__ __forceinline__ int halves() const {
    return block_halves_offset(hidden) + lane_index / 2 * 4 - lane_index * kEight;
  }
  __device__ __forceinline__ int header() const {
    return block_headers_offset(kFormat, hidden) + lane_index / 16 * 4 - lane_index * kEight;
  }
  __device__ __forceinline__ bool is_odd() const { return lane_index % 2 != 0; }
  __device__ __forceinline__ bool stores_halves() const { return lane_index % 2 == 0; }
  __device__ __forceinline__ bool stores_header() const { return lane_index % 16 == 0; }
};

// The largest of the values of a block's 16 lanes, in each of them. All 32 lanes of a warp call.
__device__ __forceinline__ uint32_t block_max(uint32_t value) {
  const bool is_first = lane_id() < 16;
  const uint32_t first = __reduce_max_sync(~0u, is_first ? value : 0);
  const uint32_t second = __reduce_max_sync(~0u, is_first ? 0 : value);
  return is_first ? first : second;
}

// How eight numbers become words and are numbers again. words: 8 bytes of the own, LogFMT's halves, the header.
template <DType kFormat>
struct BlockCode;

template <>
struct BlockCode<DType::kFp8Blocks> {
  __device__ __forceinline__ static void encode(const float (&values)[kEight], uint32_t (&words)[4]) {
    float most = 0.0f;
#pragma unroll
    for (float value : values) most = fmaxf(most, fabsf(value));  // passes over NaN
    float scale, factor;
    group_scale(Quant::kFp8, __uint_as_float(block_max(__float_as_uint(most))), scale, factor);  // bits are in order
#pragma unroll
    for (int w = 0; w < 2; w++) {
      const float* four = values + 4 * w;
      words[w] = pack_e4m3(__fmul_rn(four[0], factor), __fmul_rn(four[1], factor), __fmul_rn(four[2], factor),
                           __fmul_rn(four[3], factor));
    }
    words[2] = 0;
    words[3] = __float_as_uint(scale);
  }
  __device__ __forceinline__ static void decode(const uint32_t (&words)[4], float (&values)[kEight]) {
    const float scale = __uint_as_float(words[3]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = unpack2_e4m3(words[i / 2] >> (i % 2 * 16) & 0xFFFF);
      values[2 * i] = __fmul_rn(pair.x, scale);
      values[2 * i + 1] = __fmul_rn(pair.y, scale);
    }
  }
};

template <>
struct BlockCode<DType::kLogFmt> {
  __device__ __forceinline__ static void encode(const float (&values)[kEight], uint32_t (&words)[4]) {
    uint32_t signed_logs[kEight], least = logfmt::kEnd, most = 0;
#pragma unroll
    for (int i = 0; i < kEight; i++) {
      const uint32_t bits = __float_as_uint(values[i]);
      signed_logs[i] = logfmt::signed_log_of(bits);
      const uint32_t log = signed_logs[i] & ~0x80000000u;
      if (log != 0) least = min(least, log);
      most = max(most, logfmt::is_finite(bits) ? log : ~0u);
    }
    least = ~block_max(~least);
    most = block_max(most);
    const bool is_finite = most != ~0u;
    const logfmt::Scale scale = logfmt::Scale::of(least, is_finite ? most : 0);
    const uint32_t inverse = 0xFFFFFFFFu / scale.step;
    uint32_t codes[kEight];
#pragma unroll
    for (int i = 0; i < kEight; i++) codes[i] = is_finite ? logfmt::code_of(signed_logs[i], scale, inverse) : 0;
    const auto eight = logfmt::Eight::pack(codes);
    words[0] = eight.words[0];
    words[1] = eight.words[1];
    words[2] = eight.half | __shfl_xor_sync(~0u, eight.half, 1) << 16;
    words[3] = is_finite ? scale.header() : logfmt::kNotFinite;
  }
  __device__ __forceinline__ static void decode(const uint32_t (&words)[4], float (&values)[kEight]) {
    const logfmt::Eight eight{{words[0], words[1]}, words[2] & 0xFFFF};
    const auto scale = logfmt::Scale::of_header(words[3]);
    const bool is_finite = words[3] != logfmt::kNotFinite;
#pragma unroll
    for (int i = 0; i < kEight; i++) {
      values[i] = __uint_as_float(is_finite ? logfmt::number_of(eight.code(i), scale) : logfmt::kNaN);
    }
  }
};

// Word 2 of LogFMT has the lane's own half below and its neighbour's above; of FP8 it is 0 and does not travel.
template <DType kFormat>
struct BlockNumbers {
  static constexpr int kLaneBytes = kEight, kCount = kEight;
  static constexpr bool kHasHalves = kFormat == DType::kLogFmt;
  using Place = BlockPlace<kFormat>;
  uint32_t words[4];

  // `lane_at`: the lane's first bytes of a row.
  __device__ __forceinline__ void load_relaxed_sys(const char* lane_at, Place place) {
    const uint2 own = ptx::ld_relaxed_sys(reinterpret_cast<const uint2*>(lane_at));
    words[0] = own.x;
    words[1] = own.y;
    words[2] = 0;
    if constexpr (kHasHalves) {
      words[2] = turned(ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t*>(lane_at + place.halves())), place);
    }
    words[3] = ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t*>(lane_at + place.header()));
  }
  // From a ring (prefetch_block).
  __device__ __forceinline__ void load_shared(ptx::SharedAddress p, Place place) {
    uint4 v;
    ptx::ld_shared(p, v);
    words[0] = v.x;
    words[1] = v.y;
    words[2] = kHasHalves ? turned(v.z, place) : 0;
    words[3] = v.w;
  }
  __device__ __forceinline__ void store_remote(char* lane_at, Place place) const {
    ptx::st_row(reinterpret_cast<uint2*>(lane_at), make_uint2(words[0], words[1]));
    if (kHasHalves && place.stores_halves()) {
      ptx::st_row(reinterpret_cast<uint32_t*>(lane_at + place.halves()), words[2]);
    }
    if (place.stores_header()) ptx::st_row(reinterpret_cast<uint32_t*>(lane_at + place.header()), words[3]);
  }
  __device__ __forceinline__ void store(char* lane_at, Place place) const {
    ptx::st(reinterpret_cast<uint2*>(lane_at), make_uint2(words[0], words[1]));
    if (kHasHalves && place.stores_halves()) {
      ptx::st(reinterpret_cast<uint32_t*>(lane_at + place.halves()), words[2]);
    }
    if (place.stores_header()) ptx::st(reinterpret_cast<uint32_t*>(lane_at + place.header()), words[3]);
  }
  __device__ __forceinline__ bool have_arrived() const {
    return words[0] != kAbsent && words[1] != kAbsent && words[2] != kAbsent && words[3] != kAbsent;
  }
  __device__ __forceinline__ void fill(uint32_t word) {
#pragma unroll
    for (uint32_t& each : words) each = word;
  }
  __device__ __forceinline__ void escape() {}  // no word is kAbsent
  // All 32 lanes of a warp call.
  __device__ __forceinline__ void from(const float (&values)[kEight]) { BlockCode<kFormat>::encode(values, words); }
  // Lanes behind lane `last` take its numbers. All 32 lanes of a warp call.
  __device__ __forceinline__ void repeat(int last) {
    const int from = min(lane_id(), last);
#pragma unroll
    for (uint32_t& each : words) each = __shfl_sync(~0u, each, from);
  }
  __device__ __forceinline__ void add_to(float (&sum)[kEight]) const {
    float values[kEight];
    BlockCode<kFormat>::decode(words, values);
#pragma unroll
    for (int i = 0; i < kEight; i++) sum[i] = __fadd_rn(sum[i], values[i]);
  }

 private:
  // The word that two lanes share, the own half below.
  __device__ __forceinline__ static uint32_t turned(uint32_t word, Place place) {
    return place.is_odd() ? word >> 16 | word << 16 : word;
  }
};

template <>
struct Numbers<DType::kFp8Blocks, kEight> : BlockNumbers<DType::kFp8Blocks> {};
template <>
struct Numbers<DType::kLogFmt, kEight> : BlockNumbers<DType::kLogFmt> {};

template <DType kType>
constexpr bool kIsBlockFormat = kType == DType::kFp8Blocks || kType == DType::kLogFmt;

// What Numbers take beside the address of a lane's numbers: other types have no shared words.
template <DType kType>
using PlaceOf = std::conditional_t<kIsBlockFormat<kType>, BlockPlace<kType>, int>;
template <DType kType>
__device__ __forceinline__ PlaceOf<kType> place_of(int hidden, int lane_index) {
  if constexpr (kIsBlockFormat<kType>) {
    return {hidden, lane_index};
  } else {
    return 0;
  }
}

// Numbers of a sum, piece `piece` of a row. Lanes past the row's end hold what its last lane does: of a block format
// they would round it as a block of its own.
template <DType kType, int kCount>
__device__ __forceinline__ void round_sum(Numbers<kType, kCount>& numbers, const float (&sum)[kCount], int hidden,
                                          int piece) {
  numbers.from(sum);
  if constexpr (kIsBlockFormat<kType>) numbers.repeat(hidden / kCount - 1 - piece * 32);
}

// The bytes of a lane's numbers are at the end of those of the lanes before.
template <DType kType, int kCount>
__device__ __forceinline__ void load_of_row(Numbers<kType, kCount>& numbers, const char* row, int hidden,
                                            int lane_index) {
  if constexpr (kIsBlockFormat<kType>) {
    numbers.load_relaxed_sys(row + lane_index * numbers.kLaneBytes, place_of<kType>(hidden, lane_index));
  } else {
    numbers.load_relaxed_sys(row, lane_index);
  }
}
template <DType kType, int kCount>
__device__ __forceinline__ void store_of_row(const Numbers<kType, kCount>& numbers, char* row, int hidden,
                                             int lane_index) {
  if constexpr (kIsBlockFormat<kType>) {
    numbers.store(row + lane_index * numbers.kLaneBytes, place_of<kType>(hidden, lane_index));
  } else {
    numbers.store(row, lane_index);
  }
}

}  // namespace ep
