// A piece of a row (device/row_piece.cuh) on its way between x, the wire and the outputs.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/device/row_piece.cuh"
#include "cuda/ll/common/geometry.h"
#include "cuda/testing/testing.cuh"

namespace ep {

// ---- From x

// A vector of scales whose `left` bytes lie at any addresses; zeros past them.
static __device__ __noinline__ uint4 load_scale_bytes(const char* at, int64_t element_stride, int shift, int left) {
  uint32_t bytes[kLaneBytes];
#pragma unroll
  for (int i = 0; i < kLaneBytes; i++) {
    bytes[i] = 0;
    if (i < left) bytes[i] = ptx::ld_nc_1(at + ScaleSource::byte_at(i, element_stride, shift));
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    words[i] = bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 | bytes[4 * i + 3] << 24;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Vector c of the row: of x, or of the scales behind it. Words are loaded together, and nothing waits for them here.
__device__ __forceinline__ void load_keyed(const LlDispatchGeometry& geometry, const uint4* x, int token, int c,
                                           uint4& vector) {
  if (c >= geometry.row.vectors) return;
  const ScaleSource& scales = geometry.given_scales;
  const auto* from = reinterpret_cast<const char*>(x + c);
  const int scale_vector = c - geometry.row.payload_vectors;
  if (scale_vector >= 0) from = scales.data + token * scales.row_stride + scale_vector * scales.vector_stride;
  if (scale_vector < 0 || scales.unit == kLaneBytes) {
    vector = ptx::ld_nc(from);
    return;
  }
  const int left = scales.row_bytes - scale_vector * kLaneBytes;
  if (scales.unit == 1) {
    vector = load_scale_bytes(from, scales.element_stride, scales.shift, left);
    return;
  }
  vector.x = ptx::ld_nc_4(from);
  if (left > 4) vector.y = ptx::ld_nc_4(from + scales.word_at[1]);
  if (left > 8) vector.z = ptx::ld_nc_4(from + scales.word_at[2]);
  if (left > 12) vector.w = ptx::ld_nc_4(from + scales.word_at[3]);
}

// A piece of an own row.
template <Encoding kEncoding, int kSteps>
__device__ __forceinline__ void load_raw(const LlDispatchParams& p, const LlDispatchGeometry& geometry, int token,
                                         int piece, int lane, Raw<kEncoding, kSteps>& raw) {
  constexpr int kPerVector = Raw<kEncoding, kSteps>::kPerVector;
  const RowShape& row = geometry.row;
  const auto* x = static_cast<const uint4*>(p.x) + static_cast<int64_t>(token) * row.payload_vectors * kPerVector;
#pragma unroll
  for (int j = 0; j < kSteps; j++) {
    const int c = (piece * kSteps + j) * 32 + lane;
#pragma unroll
    for (int i = 0; i < kPerVector; i++) {
      uint4& vector_j = raw.vector[j * kPerVector + i];
      vector_j = make_uint4(0, 0, 0, 0);
      if constexpr (kEncoding == Encoding::kKeyed) {
        load_keyed(geometry, x, token, c, vector_j);
      } else if (c < row.payload_vectors) {
        vector_j = ptx::ld_nc(x + c * kPerVector + i);
      }
    }
  }
}
// Finds, for each step, the first key under which no word of the warp becomes kAbsent.
template <int kSteps>
__device__ __forceinline__ void find_keys(PieceOf<Encoding::kKeyed, kSteps>& piece, int lane) {
  piece.side = make_uint4(0, 0, 0, 0);
  bool needs_key = false;
#pragma unroll
  for (int j = 0; j < kSteps; j++) needs_key = needs_key || !has_arrived(piece.vector[j]);
  if (!__any_sync(~0u, needs_key)) return;
#pragma unroll
  for (int j = 0; j < kSteps; j++) {
    uint32_t key = 0;
    while (__any_sync(~0u, !has_arrived(piece.vector[j] ^ key))) key++;
    piece.vector[j] = piece.vector[j] ^ key;
    if (lane == j) piece.side.x = key;
  }
}

template <Encoding kEncoding, DType kType, int kSteps>
__device__ __forceinline__ void encode(const LlDispatchParams& p, const Raw<kEncoding, kSteps>& raw, int piece_index,
                                       PieceOf<kEncoding, kSteps>& piece, int lane) {
  if constexpr (kEncoding == Encoding::kFp8) {
    quantize<kType>(p.options.quant, raw, piece, lane);
    piece.side = finish_scales(p.options.quant, piece.side, piece_index * kSteps + lane, p.hidden);
  } else if constexpr (kEncoding == Encoding::kMxFp8) {
    quantize<kType>(raw, piece, lane);
  } else if constexpr (kEncoding == Encoding::kFp4) {
    quantize<kType>(p.tensor_scale != nullptr ? __ldg(p.tensor_scale) : 1.0f, raw, piece, lane);
  } else {
#pragma unroll
    for (int j = 0; j < kSteps; j++) {
      piece.vector[j] = kEncoding == Encoding::kFloat ? escaped(raw.vector[j]) : raw.vector[j];
    }
    if constexpr (kEncoding == Encoding::kKeyed) find_keys<kSteps>(piece, lane);
  }
}

// ---- On the wire

// How words of a row are stored. In another rank's window they race with its polls. A reset of the own window does not:
// the credit of the next operation orders it before the next writer.
struct RemoteStore {
  template <class Vector>
  __device__ __forceinline__ static void store(Vector* p, Vector v) {
    ptx::st_row(p, v);
  }
  __device__ __forceinline__ static void store(uint32_t* p, uint32_t v) { ptx::st_relaxed_sys(p, v); }
};
struct LocalStore {
  template <class Vector>
  __device__ __forceinline__ static void store(Vector* p, Vector v) {
    ptx::st(p, v);
  }
  __device__ __forceinline__ static void store(uint32_t* p, uint32_t v) { *p = v; }
};

// Byte of a row's slot at which a lane's words of a piece begin.
template <int kSteps>
__device__ __forceinline__ int lane_offset(int piece_index, int lane) {
  return (piece_index * kSteps * 32 + lane) * kLaneBytes;
}

// `at`: lane_offset() in the slot.
template <class Store, int kSteps, int kSides>
__device__ __forceinline__ void store_wire(char* at, const RowShape& row, int piece_index,
                                           const Piece<kSteps, kSides>& piece, int lane) {
  const int first = piece_index * kSteps * 32 + lane, left = row.vectors - first;
  auto* vectors = reinterpret_cast<uint4*>(at);
#pragma unroll
  for (int j = 0; j < kSteps; j++) {
    if (j * 32 < left) Store::store(vectors + j * 32, piece.vector[j]);
    testing_point(Point::kBetweenWords);
  }
  const int index = piece_index * kSides + lane;
  if (lane >= kSides || index >= row.sides) return;
  char* side = at + (row.side_offset + index * row.side_bytes - first * kLaneBytes);
  if (row.side_bytes == 16) {
    Store::store(reinterpret_cast<uint4*>(side), piece.side);
  } else {
    Store::store(reinterpret_cast<uint32_t*>(side), piece.side.x);
  }
}

// Reads whatever is there. Words that are not this row's count as arrived.
template <int kSteps, int kSides>
__device__ __forceinline__ void load_wire(const char* at, const RowShape& row, int piece_index,
                                          Piece<kSteps, kSides>& piece, int lane) {
  const int first = piece_index * kSteps * 32 + lane, left = row.vectors - first;
  const auto* vectors = reinterpret_cast<const uint4*>(at);
#pragma unroll
  for (int j = 0; j < kSteps; j++) {
    piece.vector[j] = j * 32 < left ? ptx::ld_relaxed_sys(vectors + j * 32) : make_uint4(0, 0, 0, 0);
  }
  piece.side = make_uint4(0, 0, 0, 0);
  const int index = piece_index * kSides + lane;
  if (lane >= kSides || index >= row.sides) return;
  const char* side = at + (row.side_offset + index * row.side_bytes - first * kLaneBytes);
  if (row.side_bytes == 16) {
    piece.side = ptx::ld_relaxed_sys(reinterpret_cast<const uint4*>(side));
  } else {
    piece.side.x = ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t*>(side));
  }
}

template <int kSteps, int kSides>
__device__ __forceinline__ bool has_arrived(const Piece<kSteps, kSides>& piece) {
  bool ok = kSides == 0 || has_arrived(piece.side);
#pragma unroll
  for (int j = 0; j < kSteps; j++) ok = ok && has_arrived(piece.vector[j]);
  return __all_sync(~0u, ok);
}

// Back to the resting state, for the operation after next.
template <int kSteps, int kSides>
__device__ __forceinline__ void reset_wire(char* at, const RowShape& row, int piece_index, int lane) {
  Piece<kSteps, kSides> rest;
#pragma unroll
  for (int j = 0; j < kSteps; j++) rest.vector[j] = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
  rest.side = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
  store_wire<LocalStore>(at, row, piece_index, rest, lane);
}

// ---- To the outputs

template <Encoding kEncoding, int kSteps>
__device__ __forceinline__ void decode(PieceOf<kEncoding, kSteps>& piece) {
  if constexpr (kEncoding == Encoding::kKeyed) {
#pragma unroll
    for (int j = 0; j < kSteps; j++) piece.vector[j] = piece.vector[j] ^ __shfl_sync(~0u, piece.side.x, j);
  }
  if constexpr (kEncoding == Encoding::kFp4) {
    const int lane = lane_id();
    if (lane >= kSidesOf<kEncoding, kSteps>) piece.side = make_uint4(0, 0, 0, 0);
    unescape(piece, lane);
  }
}

// The first `left` bytes of a vector.
static __device__ __noinline__ void store_scale_bytes(char* at, uint4 vector, int left) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < kLaneBytes; i++) {
    if (i < left) at[i] = static_cast<char>(words[i / 4] >> i % 4 * 8);
  }
}

// The same in words or bytes; `left` may be more than there are.
__device__ __forceinline__ void store_scale_units(char* at, uint4 vector, int unit, int left) {
  if (unit == 1) return store_scale_bytes(at, vector, left);
  auto* words = reinterpret_cast<uint32_t*>(at);
  words[0] = vector.x;
  if (left > 4) words[1] = vector.y;
  if (left > 8) words[2] = vector.z;
  if (left > 12) words[3] = vector.w;
}

// The scales of a step, four floats or one word of exponents. `unit`: ScaleTarget's.
__device__ __forceinline__ void store_step_scales(const Scales& scales, int unit, int64_t row_offset, int step,
                                                  uint4 side, int side_bytes) {
  const int first = side_bytes == 16 ? step * 4 : step;
  auto* target = static_cast<uint32_t*>(scales.data) + row_offset + first * scales.group_stride;
  if (side_bytes == 4) {
    *target = side.x;
    return;
  }
  if (unit == kLaneBytes) {
    ptx::st(reinterpret_cast<uint4*>(target), side);
    return;
  }
  const uint32_t words[4] = {side.x, side.y, side.z, side.w};
  for (int i = 0; i < 4 && first + i < scales.count; i++) target[i * scales.group_stride] = words[i];
}

// Sixteen scales of a byte, from 16 * index on, of a row of all rows or of its bin, each of which has tiles of its own.
static __device__ __noinline__ void store_swizzled_scales(const LlDispatchParams& p, uint32_t out_row, uint32_t bin,
                                                          int index, uint4 side) {
  const OutputShape& output = p.output;
  const bool has_bins = output.has_parts();
  const uint32_t bin_rows = output.layout == OutputLayout::kRankMajor ? p.shape.max_tokens : output.capacity;
  if (!has_bins) bin = 0;
  if (output.layout == OutputLayout::kRankMajor) bin = out_row / bin_rows;
  const int words = ceil_div(p.out_scales.count, kScaleTileScales);
  const int64_t bin_bytes = ceil_div<int64_t>(bin_rows, kScaleTileRows) * words * kScaleTileBytes;
  char* out = static_cast<char*>(p.out_scales.data) + bin * bin_bytes;
  const uint32_t four[4] = {side.x, side.y, side.z, side.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int word = 4 * index + i;
    if (word >= words) return;
    *reinterpret_cast<uint32_t*>(out + swizzled_word(out_row - bin * bin_rows, word, words)) = four[i];
  }
}

// Stores a piece into any number of rows.
template <Encoding kEncoding, int kSteps>
struct RowWriter {
  static constexpr bool kQuantises = kEncoding != Encoding::kFloat && kEncoding != Encoding::kKeyed;
  uint4* out;  // the lane's first vector of row 0
  int row_vectors, payload_left, vectors_left, side, side_bytes;
  bool has_scales;
  int64_t bin_gap;   // scales of an expert begin so much after the end of those before
  char* scales_out;  // where the scales of row 0 would have the lane's first vector

  __device__ __forceinline__ void compute_addr(const LlDispatchParams& p, const LlDispatchGeometry& geometry,
                                               int piece_index, int lane) {
    const RowShape& row = geometry.row;
    const int first = piece_index * kSteps * 32 + lane;
    out = ptx::opaque(static_cast<uint4*>(p.out_x) + first);
    row_vectors = row.payload_vectors;
    payload_left = row.payload_vectors - first;
    vectors_left = row.vectors - first;
    side = piece_index * kSidesOf<kEncoding, kSteps> + lane;
    side_bytes = row.side_bytes;
    has_scales = kQuantises && lane < kSidesOf<kEncoding, kSteps> && side < row.sides;
    bin_gap = 0;
    if (p.out_scales.bin_stride != 0) bin_gap = p.out_scales.bin_stride - p.output.capacity * p.out_scales.row_stride;
    scales_out = geometry.out_scales.data;
    if (kEncoding == Encoding::kKeyed && scales_out != nullptr)
      scales_out -= static_cast<int64_t>(payload_left) * kLaneBytes;
  }
  // `row_scales`: scales_out, of the row.
  __device__ __forceinline__ void store_keyed(const ScaleTarget& keyed_scales, uint4* target, char* row_scales, int j,
                                              uint4 vector) const {
    if (j * 32 >= vectors_left) return;
    const bool is_scales = j * 32 >= payload_left;
    char* to = is_scales ? row_scales + j * 32 * kLaneBytes : reinterpret_cast<char*>(target + j * 32);
    if (!is_scales || keyed_scales.unit == kLaneBytes) {
      ptx::st(reinterpret_cast<uint4*>(to), vector);
    } else {
      const int left = keyed_scales.row_bytes - (j * 32 - payload_left) * kLaneBytes;
      store_scale_units(to, vector, keyed_scales.unit, left);
    }
  }
  // `expert`: whose row it is; of no meaning in rank layouts.
  __device__ __forceinline__ void store(const LlDispatchParams& p, const ScaleTarget& out_scales, int32_t out_row,
                                        uint32_t expert, const PieceOf<kEncoding, kSteps>& piece) const {
    const auto row = static_cast<uint64_t>(static_cast<uint32_t>(out_row));
    uint4* target = out + row * static_cast<uint32_t>(row_vectors);
#pragma unroll
    for (int j = 0; j < kSteps; j++) {
      if constexpr (kEncoding == Encoding::kKeyed) {
        const uint64_t row_scales = row * static_cast<uint32_t>(out_scales.row_bytes);
        store_keyed(out_scales, target, scales_out + row_scales, j, piece.vector[j]);
      } else if (j * 32 < payload_left) {
        ptx::st(target + j * 32, piece.vector[j]);
      }
    }
    if (!has_scales) return;
    if constexpr (kEncoding == Encoding::kFp8) {
      const Scales& scales = p.out_scales;
      store_step_scales(scales, out_scales.unit, out_row * scales.row_stride + expert * bin_gap, side, piece.side,
                        side_bytes);
    } else if constexpr (kQuantises) {
      if (is_swizzled(p.options.quant)) return store_swizzled_scales(p, out_row, expert, side, piece.side);
      const int first = side * kLaneBytes, left = out_scales.row_bytes - first;
      char* at = out_scales.data + row * static_cast<uint32_t>(out_scales.row_bytes) + first;
      if (out_scales.unit == kLaneBytes) {
        ptx::st(reinterpret_cast<uint4*>(at), piece.side);
      } else {
        store_scale_units(at, piece.side, out_scales.unit, left);
      }
    }
  }
};

}  // namespace ep
