// Rows on the host: numbers in and out, FP8 quantisation, and the form that travels.
#pragma once

#include <cstdint>

#include "layout/common/block_formats.h"
#include "layout/common/wire.h"

namespace ep {

// A row of `count` elements; of a block format, which is rounded to, wire_row_bytes(dtype, count) bytes.
void to_floats(DType dtype, const void* values, float* floats, int count);
void from_floats(DType dtype, const float* floats, void* values, int count);

// Quantises a row of `hidden` floats; writes quant_row_bytes() and quant_scale_bytes(). `tensor_scale`: of NVFP4.
void quantize_row(Quant quant, const float* row, int hidden, uint8_t* payload, void* scales, float tensor_scale = 1);

// Blocks of NVFP4 to words none of which means "not arrived", in place, and back (small_blocks.h).
void escape_nvfp4(uint32_t* payload, uint8_t* scales, int blocks);
void unescape_nvfp4(uint32_t* payload, uint8_t* scales, int blocks);

// Payload and scales of a row to wire words in place, and back. The body lies at the start of `words`.
void encode_row(const RowFormat& format, uint32_t* words);
void decode_row(const RowFormat& format, uint32_t* words);

}  // namespace ep
