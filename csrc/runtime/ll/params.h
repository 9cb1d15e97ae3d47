// One struct an operation: everything a backend needs to run it. Pointers are to memory of the backend's device.
#pragma once

#include <cstdint>

#include "layout/common/dtype.h"
#include "layout/common/outputs.h"
#include "layout/common/shape.h"
#include "layout/common/wire.h"
#include "layout/ll/offsets.h"
#include "runtime/common/arrivals.h"
#include "runtime/common/params.h"
#include "runtime/common/row_signals.h"
#include "runtime/options.h"

namespace ep {

// Both phases at once, or one of them; a split operation runs its caller's work between the two.
enum class Phase : int { kFused = 0, kSend = 1, kRecv = 2 };
EP_HD bool sends(Phase phase) { return phase != Phase::kRecv; }
EP_HD bool receives(Phase phase) { return phase != Phase::kSend; }

// A handle's parts in its int32 tensor.
struct HandlePtrs {
  int32_t* tokens = nullptr;    // [R]
  int32_t* dispatch = nullptr;  // [1]
  int32_t* ids = nullptr;       // [T, K], ids out of range replaced by -1
  int32_t* rows = nullptr;      // [R, M, map_k]
  float* weights = nullptr;     // [R, M, map_k]

  static HandlePtrs of(int32_t* base, const HandleShape& shape) {
    return {base, base + shape.num_ranks, base + shape.ids_at(), base + shape.map_at(),
            reinterpret_cast<float*>(base + shape.weights_at())};
  }
};

// Caller's scales [T, S] of any strides (in elements), or the output's. `bin_stride`: of expert_major outputs [L, C, S]
// from expert to expert; 0 where it is C * row_stride.
struct Scales {
  void* data = nullptr;
  int64_t row_stride = 0, group_stride = 0;
  int count = 0;  // S
  int element_bytes = 4;
  int64_t bin_stride = 0;
};

// The order is that of a kernel's needs.
struct LlDispatchParams {
  // In: read by the send only.
  const void* x = nullptr;  // [T, H]
  const void* topk_idx = nullptr;
  const float* topk_weights = nullptr;  // [T, K], null: ones
  int num_tokens = 0;
  bool is_idx64 = true;
  Phase phase = Phase::kFused;

  Shape shape;
  LlOffsets offsets;
  OpHeader header;
  OutputShape output;
  DispatchOptions options;
  DType dtype = DType::kBF16;  // of x
  int hidden = 0;              // elements of a row of x
  RowFormat row;
  Scales scales;                        // given by the caller; data null if none
  const float* tensor_scale = nullptr;  // NVFP4; null: 1

  // Out: written by the receive, but for the handle's ids.
  void* out_x = nullptr;  // [rows, payload bytes]
  Scales out_scales;
  int32_t* info = nullptr;        // OutputShape
  int32_t* row_expert = nullptr;  // packed: [rows]
  void* out_topk_idx = nullptr;   // rank layouts: [rows, K], of the type of topk_idx
  float* out_weights = nullptr;   // [rows] or [rows, K]
  HandlePtrs handle;
  // expert_major: DeepEP's account of the rows; null: not asked for.
  int32_t* src_info = nullptr;      // [L, C] index of each row's token at its source
  int64_t* layout_range = nullptr;  // [L, R] first row of a source in the expert << 32 | its rows there
  int32_t* recv_stats = nullptr;    // [bins] the counts are added
  int64_t* wait_cost = nullptr;     // [R] ns that this rank waited for each source are added
  Arrivals arrivals;

  // Rows are converted, or the caller's bits: a warp has more to do for each byte.
  bool is_heavy() const { return options.quant != Quant::kNone || row.is_keyed; }
};

struct LlCombineParams {
  Phase phase = Phase::kFused;
  int num_tokens = 0;
  int hidden = 0;
  CombineOptions options;
  const void* rows = nullptr;  // [output.rows(), H]
  HandlePtrs handle;           // of the dispatch
  Shape shape;
  LlOffsets offsets;
  OpHeader header;
  OutputShape output;
  void* out = nullptr;  // [T, H]

  DType dtype = DType::kBF16;           // of rows
  RowFormat row;                        // of a partial sum
  int domain_size = 1;                  // the order of the sum: ranks of a domain, then domains
  const float* home_weights = nullptr;  // kHome: [T, K]
  const void* home_topk_idx = nullptr;  // kHome: optional [T, K], -1 skips
  bool is_idx64 = true;
  bool sends_unweighted = false;             // kHome, split: all ranks send rows, which the home ranks weight
  const void* bias[2] = {nullptr, nullptr};  // [T, H] of out_dtype
  int64_t* wait_cost = nullptr;              // optional [R]: ns that this rank waited for each other are added
  RowSignals signals;                        // sends_unweighted: that the send waits for
};

// Scalars instead of rows: the value of each expert row goes to the token's home.
struct LlCombineWeightsParams {
  Shape shape;
  LlOffsets offsets;
  OpHeader header;
  OutputShape output;
  HandlePtrs handle;
  const float* values = nullptr;  // [rows] or [rows, K]
  int num_tokens = 0;
  float* out = nullptr;  // [T, K]
};

}  // namespace ep
