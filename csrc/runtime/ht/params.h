// One struct an operation of high throughput, as params.h has them for low latency.
#pragma once

#include <cstdint>

#include "layout/common/dtype.h"
#include "layout/common/outputs.h"
#include "layout/common/shape.h"
#include "layout/common/wire.h"
#include "layout/ht/handle.h"
#include "layout/ht/offsets.h"
#include "runtime/common/arrivals.h"
#include "runtime/common/params.h"
#include "runtime/common/recorded_words.h"
#include "runtime/common/row_signals.h"
#include "runtime/options.h"

namespace ep {

// A dispatch of known capacity routes and sends in one operation. Exact sizes take two: the host makes the outputs in
// between. A cached one sends another payload along the routes of a handle.
enum class HtVariant : int { kRouteAndSend = 0, kRoute = 1, kSend = 2, kCached = 3 };
EP_HD bool routes(HtVariant variant) { return variant == HtVariant::kRouteAndSend || variant == HtVariant::kRoute; }
EP_HD bool sends_rows(HtVariant variant) { return variant != HtVariant::kRoute; }
EP_HD bool sends_metadata(HtVariant variant) {
  return variant == HtVariant::kRouteAndSend || variant == HtVariant::kSend;
}

// One tensor [T, n] of a dispatch, or the scales that the operation makes (`in` is null then).
struct HtPart {
  const void* in = nullptr;
  int64_t row_stride = 0, element_stride = 0;  // of `in`, bytes
  int elements = 0, element_bytes = 1;         // of a row of `in`
  int bytes = 0;                               // of a row that travels, and of `out`, which is contiguous
  void* out = nullptr;
  Offset out_offset = kNoOffset;  // of `out` in the arena, for the senders; kNoOffset: they write to the staging rows

  // Rows of so many bytes, one after the other: each is one element, so that it moves at once.
  static HtPart contiguous(const void* in, int bytes) {
    HtPart part;
    part.in = in;
    part.row_stride = part.element_bytes = part.bytes = bytes;
    part.elements = 1;
    return part;
  }
  // `count` elements a row. Strides in elements.
  static HtPart of(const void* in, int64_t num_rows, int count, int element_bytes, int64_t row_stride,
                   int64_t element_stride) {
    const int bytes = count * element_bytes;
    const bool is_contiguous = (element_stride == 1 || count <= 1) && (row_stride == count || num_rows <= 1);
    return is_contiguous ? contiguous(in, bytes)
                         : strided(in, num_rows, bytes, element_bytes, row_stride, element_stride);
  }
  // Strides in elements.
  static HtPart strided(const void* in, int64_t num_rows, int bytes, int element_bytes, int64_t row_stride,
                        int64_t element_stride) {
    row_stride = usable_stride(num_rows, row_stride);
    element_stride = usable_stride(bytes / element_bytes, element_stride);
    HtPart part;
    part.in = in;
    part.row_stride = row_stride * element_bytes;
    part.element_stride = element_stride * element_bytes;
    part.elements = bytes / element_bytes;
    part.element_bytes = element_bytes;
    part.bytes = bytes;
    return part;
  }
};

struct HtDispatchParams {
  Shape shape;
  HtOffsets offsets;
  OpHeader header;
  HtVariant variant = HtVariant::kRouteAndSend;
  DispatchOptions options;     // quant: of part 0; part 1 is the scales then
  DType dtype = DType::kBF16;  // of part 0
  int hidden = 0;
  int num_parts = 0;
  HtPart parts[kHtMaxParts];
  const float* tensor_scale = nullptr;  // NVFP4; null: 1

  // In: read where the steps route (ids), or send routes (weights).
  const void* topk_idx = nullptr;
  bool is_idx64 = true;
  const float* topk_weights = nullptr;  // [T, K], null: ones
  int num_tokens = 0;

  OutputShape output;   // kRoute: of capacity INT32_MAX, so that nothing is dropped
  HtHandlePtrs handle;  // `slots` part: where the steps send

  // Out. Where the steps route:
  int32_t* info = nullptr;  // OutputShape
  // kRoute, memory that the host sees: rows that the output needs, slots, then the demand of each local expert [L].
  int64_t* host_sizes = nullptr;
  int64_t* host_most_tokens = nullptr;  // kRoute, likewise, null if nobody asks: of any rank
  uint64_t* host_epoch = nullptr;       // CUDA: becomes the call's epoch when the sizes are there
  // Where the steps send routes:
  int32_t* row_expert = nullptr;
  void* out_topk_idx = nullptr;
  float* out_weights = nullptr;
  int chunks = 1;  // CUDA fills it in: the plan's, of the kernel that sends
  Arrivals arrivals;
  RecordedWords recorded;  // counts of a kRouteAndSend alone

  // Where the handle that the operation was given says of which dispatch it is. Null: the operation makes one.
  EP_HD const int32_t* given_dispatch() const { return routes(variant) ? nullptr : handle.dispatch; }

  // Where the operation quantises part 0, its rows travel as e4m3, and the next part is the scales.
  void add_quant_scales() {
    parts[0].bytes = quant_row_bytes(options.quant, hidden);
    parts[num_parts++].bytes = quant_scale_bytes(options.quant, hidden);
  }
};

// Rows, or a scalar for each of their choices, or both, go home. Readers pull: the rows where they lie if that is the
// arena (CUDA: or their own GPU), no sum is needed here, and the wire's dtype is no smaller; else from the staging rows
// of their owner, in the wire dtype, by slot.
struct HtCombineParams {
  Shape shape;
  HtOffsets offsets;
  OpHeader header;
  DType dtype = DType::kBF16;  // of rows
  CombineOptions options;
  int hidden = 0;  // 0: no rows, scalars only

  const void* rows = nullptr;      // [output.rows(), H]
  Offset rows_offset = kNoOffset;  // of rows in the arena
  bool has_values = false;
  const float* values = nullptr;  // [rows] or [rows, K]
  OutputShape output;
  HtHandlePtrs handle;
  const float* home_weights = nullptr;  // kHome: [T, K]
  const void* home_topk_idx = nullptr;  // kHome: optional [T, K], an id that is no expert skips
  bool is_idx64 = true;
  const void* bias[2] = {nullptr, nullptr};  // [T, H] of out_dtype
  int num_tokens = 0;
  void* out = nullptr;          // [T, H]
  float* out_values = nullptr;  // [T, K]
  RowSignals signals;           // that staging waits for; of experts' rows alone
  RecordedWords recorded;

  EP_HD const int32_t* given_dispatch() const { return handle.dispatch; }
  EP_HD bool has_rows() const { return hidden > 0; }
  // By ranks that can reach the rows. A block format's elements count as one byte: rows are never read in place.
  EP_HD bool can_read_in_place() const {
    return has_rows() && !has_expert_rows(output.layout) && size_of(dtype) <= size_of(options.wire_dtype);
  }
  EP_HD bool reads_in_place() const { return can_read_in_place() && rows_offset != kNoOffset; }
};

// Which ranks get which of this rank's tokens, for callers that want to know beforehand. No other rank takes part.
struct TokenLayoutParams {
  Shape shape;
  Topology topology;
  int num_tokens = 0;
  bool is_idx64 = true;
  const void* topk_idx = nullptr;  // [T, K]; an id that is no expert is no choice
  // Of each rank its tokens [R], of several domains theirs [D], of each expert its choices [E].
  int32_t* counts = nullptr;
  bool* is_in_rank = nullptr;  // [T, R]

  EP_HD bool has_domains() const { return topology.num_domains() > 1; }
  EP_HD int domain_bin(int domain) const { return shape.num_ranks + domain; }
  EP_HD int expert_bin(int expert) const { return domain_bin(has_domains() ? topology.num_domains() : 0) + expert; }
  EP_HD int num_counts() const { return expert_bin(shape.num_experts); }
};

}  // namespace ep
