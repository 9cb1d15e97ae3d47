// Element types, as far as the library must tell them apart.
#pragma once

#include "base/math.h"
#include "base/platform.h"

namespace ep {

enum class DType : int {
  kBF16 = 0,
  kF16 = 1,
  kF32 = 2,
  kF8E4M3 = 3,
  kOpaque8 = 4,  // moved bit for bit, never read as a number
  kOpaque16 = 5,
  kOpaque32 = 6,
  kOpaque64 = 7,
  // Only of partial sums on their way home (block_formats.h); size_of() is 1, less than of any number that is added up:
  kFp8Blocks = 8,  // e4m3, fp32 scale amax / 448 for 128 elements
  kLogFmt = 9,     // 10 bits, evenly spaced in the logarithm
};

EP_HD int size_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
    case DType::kF16:
    case DType::kOpaque16:
      return 2;
    case DType::kF32:
    case DType::kOpaque32:
      return 4;
    case DType::kOpaque64:
      return 8;
    default:
      return 1;
  }
}

// Types that combine adds up, and whose all-ones word is a NaN that may become another NaN on the wire.
EP_HD bool is_float(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32; }

inline const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"bf16",    "fp16",    "fp32",    "e4m3", "8 bits",
                                    "16 bits", "32 bits", "64 bits", "fp8",  "logfmt"};
  return kNames[static_cast<int>(dtype)];
}

// What dispatch does to rows before they travel.
enum class Quant : int {
  kNone = 0,
  kFp8 = 1,         // e4m3, fp32 scale amax / 448 for 128 elements
  kFp8Rounded = 2,  // the scale is rounded up to a power of two
  kFp8Ue8m0 = 3,    // the same, four exponents packed in an int32
  // small_blocks.h:
  kMxfp8 = 4,          // e4m3, an e8m0 scale for 32 elements
  kMxfp8Swizzled = 5,  // the same; the receiver has the scales in the order of swizzled_scale()
  kNvfp4 = 6,          // e2m1, an e4m3 scale for 16 elements, and one fp32 scale for all
  kNvfp4Swizzled = 7,
};
EP_HD bool is_mxfp8(Quant quant) { return quant == Quant::kMxfp8 || quant == Quant::kMxfp8Swizzled; }
EP_HD bool is_nvfp4(Quant quant) { return quant == Quant::kNvfp4 || quant == Quant::kNvfp4Swizzled; }
EP_HD bool is_swizzled(Quant quant) { return quant == Quant::kMxfp8Swizzled || quant == Quant::kNvfp4Swizzled; }

inline const char* name_of(Quant quant) {
  constexpr const char* kNames[] = {"none",           "fp8",   "fp8_rounded",   "fp8_ue8m0", "mxfp8",
                                    "mxfp8_swizzled", "nvfp4", "nvfp4_swizzled"};
  return kNames[static_cast<int>(quant)];
}

constexpr int kQuantGroup = 128;  // elements that share a scale of FP8
constexpr int kMxBlock = 32, kNvfp4Block = 16;

// Bytes of a row that this library quantises. Int: int, or torch's SymInt.
template <class Int>
EP_HD Int quant_row_bytes(Quant quant, Int hidden) {
  return is_nvfp4(quant) ? hidden / 2 : hidden;
}
// Its scales, and the bytes of one.
template <class Int>
EP_HD Int num_quant_scales(Quant quant, Int hidden) {
  if (is_mxfp8(quant)) return hidden / kMxBlock;
  if (is_nvfp4(quant)) return hidden / kNvfp4Block;
  const Int groups = (hidden + (kQuantGroup - 1)) / kQuantGroup;
  return quant == Quant::kFp8Ue8m0 ? (groups + 3) / 4 : groups;
}
EP_HD int quant_scale_size(Quant quant) { return is_mxfp8(quant) || is_nvfp4(quant) ? 1 : 4; }
EP_HD int quant_scale_bytes(Quant quant, int hidden) {
  return quant == Quant::kNone ? 0 : num_quant_scales(quant, hidden) * quant_scale_size(quant);
}

}  // namespace ep
