// Formats of partial sums that travel in less than 16 bits an element: FP8 and LogFMT. A row is cut into blocks of 128
// elements, of which the last may be shorter, and each block has a header of 4 bytes. docs/semantics.md says what is
// lost. LogFMT is integer arithmetic alone, so that every backend gets the same bits.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "base/platform.h"
#include "layout/common/dtype.h"

namespace ep {

constexpr int kBlockElements = 128;
static_assert(kBlockElements == kQuantGroup);
constexpr int kEight = 8;  // elements that a lane of a kernel holds: 16 bits of them lie apart in LogFMT

EP_HD bool is_block_format(DType dtype) { return dtype == DType::kFp8Blocks || dtype == DType::kLogFmt; }

// Where the parts of a row lie: 8 bytes for eight elements; LogFMT: 2 more bytes for each eight; headers; zeros up to a
// multiple of 16. Rows are of a multiple of 16 elements.
EP_HD int block_halves_offset(int hidden) { return hidden; }
EP_HD int block_headers_offset(DType format, int hidden) {
  return format == DType::kLogFmt ? hidden + hidden / 4 : hidden;
}
// Bytes of a row of `hidden` elements, of a number's type or of a block format.
EP_HD int wire_row_bytes(DType dtype, int hidden) {
  if (!is_block_format(dtype)) return hidden * size_of(dtype);
  return align_up(block_headers_offset(dtype, hidden) + 4 * ceil_div(hidden, kBlockElements), 16);
}

// ---- LogFMT: a sign and 9 bits. Code 0 is zero, codes 1 to 509 are magnitudes, evenly spaced in the logarithm.
//
// A logarithm is a number of 24 bits: log2 of the magnitude plus 127, in units of 2^-16. What is below the smallest
// normal number of fp32 counts as zero.
namespace logfmt {

constexpr uint32_t kLastCode = 509, kIntervals = kLastCode - 1;
constexpr uint32_t kOctave = 1u << 16;                      // a factor of two
constexpr uint32_t kSmallest = kOctave, kEnd = 255u << 16;  // of normal numbers
constexpr uint32_t kRange = 32 * kOctave;                   // of a block: smaller magnitudes are the smallest or zero
constexpr uint32_t kNotFinite = 0x80000000u;                // header of a block with an infinity or a NaN: all are NaN
constexpr uint32_t kNaN = 0x7FC00000u;                      // what they become

// log2(1 + x) - x and 1 + x - 2^x of x in units of 2^-16, two of them off at most: x (1 - x) times a polynomial. The
// results are monotone, and powers of two are exact.
EP_HD uint32_t log_above_line(uint32_t x) {
  const uint32_t factor = 28961 - (x * (17510 - (x * (9727 - (x * 2959 >> 16)) >> 16)) >> 16);
  return ((x * (kOctave - x) >> 16) * factor + 32768) >> 16;
}
EP_HD uint32_t exp_below_line(uint32_t x) {
  const uint32_t factor = 20119 + (x * (4289 + (x * 898 >> 16)) >> 16);
  return ((x * (kOctave - x) >> 16) * factor + 32768) >> 16;
}

EP_HD bool is_finite(uint32_t float_bits) { return (float_bits & 0x7F800000u) != 0x7F800000u; }

// Of finite numbers; 0: a zero.
EP_HD uint32_t log_of(uint32_t float_bits) {
  const uint32_t magnitude = float_bits & 0x7FFFFFFFu;
  if (magnitude < 0x00800000u) return 0;
  const uint32_t line = (magnitude + 64) >> 7;  // the mantissa in the place of the logarithm's fraction
  return line < kEnd ? line + log_above_line(line & 0xFFFF) : kEnd - 1;
}
EP_HD uint32_t signed_log_of(uint32_t float_bits) { return (float_bits & 0x80000000u) | log_of(float_bits); }
EP_HD uint32_t magnitude_of(uint32_t log) { return (log - exp_below_line(log & 0xFFFF)) << 7; }

// A block's scale, as its header has it: the first magnitude in units of 2^-8 | the step << 16.
struct Scale {
  uint32_t first = 0, step = 1;  // logarithms

  // Of the smallest and largest logarithm in a block of finite numbers, zeros apart; `most` 0: there are only zeros.
  EP_HD static Scale of(uint32_t least, uint32_t most) {
    Scale scale;
    const uint32_t floor = most > kRange ? most - kRange : 0;
    if (least < floor) least = floor;
    if (most == 0) least = 0;
    scale.first = least & ~0xFFu;
    scale.step = (most - scale.first + kIntervals - 1) / kIntervals;
    if (scale.step == 0) scale.step = 1;
    return scale;
  }
  EP_HD static Scale of_header(uint32_t header) { return {(header & 0xFFFF) << 8, header >> 16}; }
  EP_HD uint32_t header() const { return first >> 8 | step << 16; }
};

// The code of a number, from its signed_log_of: sign << 9 | 0 to 509. `inverse`: 0xFFFFFFFF / scale.step.
EP_HD uint32_t code_of(uint32_t signed_log, const Scale& scale, uint32_t inverse) {
  const uint32_t sign = signed_log >> 31 << 9, log = signed_log & ~0x80000000u;
  if (log + kOctave < scale.first || log == 0) return sign;  // less than half of the smallest
  if (log <= scale.first) return sign | 1;
  const uint32_t above = log - scale.first + scale.step / 2;
  uint32_t steps = static_cast<uint32_t>(static_cast<uint64_t>(above) * inverse >> 32);
  if (above - steps * scale.step >= scale.step) steps++;  // the product is at most one too small
  return sign | (1 + (steps < kIntervals ? steps : kIntervals));
}
// The number, as bits of fp32.
EP_HD uint32_t number_of(uint32_t code, const Scale& scale) {
  const uint32_t sign = code >> 9 << 31, steps = code & 511;
  if (steps == 0) return sign;
  const uint32_t log = scale.first + (steps - 1) * scale.step;
  return sign | magnitude_of(log < kEnd ? log : kEnd - 1);
}

// Eight codes. No byte of a code's upper 8 magnitude bits is 0xFF, as codes end at 509, and each word has such a byte
// (a word of halves four): none is the word that means "not arrived".
struct Eight {
  uint32_t words[2];
  uint32_t half;  // 16 bits

  EP_HD static uint32_t upper(uint32_t code) { return code >> 1 & 0xFF; }
  EP_HD static uint32_t rest(uint32_t code) { return (code >> 8 & 2) | (code & 1); }

  EP_HD static Eight pack(const uint32_t (&codes)[kEight]) {
    Eight eight;
    for (int w = 0; w < 2; w++) {
      uint32_t word = 0;
      for (int i = 0; i < 4; i++) word |= rest(codes[4 * w + i]) << (24 + 2 * i);
      for (int i = 0; i < 3; i++) word |= upper(codes[3 * w + i]) << (8 * i);
      eight.words[w] = word;
    }
    eight.half = upper(codes[6]) | upper(codes[7]) << 8;
    return eight;
  }
  EP_HD uint32_t code(int index) const {
    const uint32_t rest = words[index / 4] >> (24 + 2 * (index % 4)) & 3;
    const uint32_t upper = index < 6 ? words[index / 3] >> (8 * (index % 3)) : half >> (8 * (index - 6));
    return rest >> 1 << 9 | (upper & 0xFF) << 1 | (rest & 1);
  }
};

}  // namespace logfmt
}  // namespace ep
