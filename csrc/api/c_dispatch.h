// A dispatch as the caller has described it, whichever algorithm runs it.
#pragma once

#include <array>

#include "api/c_objects.h"
#include "api/c_tensor.h"
#include "runtime/options.h"

namespace ep::c {

// What the structs of a call say. Sizes and types are checked, memory is not.
struct DispatchCall {
  bool is_split = false, is_cached = false, is_backward = false;
  Tensor tokens, weights, scales;
  std::array<Tensor, NCCL_EPX_MAX_EXTRA> extra;
  DispatchOptions options;
  DType dtype = DType::kBF16;  // of tokens
  int hidden = 0;
  int num_scales = 0, scale_bytes = 4;  // of an output row, and of one of them
};

// An output as it must be; ndim 0: the call has none.
struct Output {
  const char* name;
  const ncclEpTensor_t* given;  // may be null
  DataType dtype;
  Sizes sizes;
  void* scratch = nullptr;  // where it goes if it is not given; null: it must be
  bool is_least = false;    // there may be more rows
};
enum { kTokens, kScales, kWeights, kIdx, kRowExpert, kInfo, kExtra, kNumOutputs = kExtra + NCCL_EPX_MAX_EXTRA };
using Outputs = std::array<Output, kNumOutputs>;
using OutputPointers = std::array<void*, kNumOutputs>;  // null where the call has none, or it has no elements

DispatchCall take_call(const ncclEpHandle& handle, const ncclEpDispatchInputs_t& inputs,
                       const ncclEpDispatchConfig_t& config, const ncclEpxDispatchExtra_t& extra);
// Their memory, for the tokens of the handle's ids, or, cached, of its dispatch.
void check_inputs(const DispatchCall& call, const ncclEpHandle& handle, int num_tokens);
Outputs outputs_of(const DispatchCall& call, const ncclEpHandle& handle, const ncclEpDispatchOutputs_t& given,
                   const ncclEpxDispatchExtra_t& extra);
OutputPointers take_outputs(const Outputs& outputs);
// Refuses outputs that overlap what the call reads, or one another.
void check_apart(const DispatchCall& call, const ncclEpHandle& handle, const Outputs& outputs,
                 const OutputPointers& pointers);

Sizes row_sizes(const OutputShape& output);  // the leading ones of tensors of rows

// ---- Handles without options, as NCCL EP has them (c_plain.cc).

// What its callers must and must not give.
void check_plain(const DispatchCall& call, const ncclEpHandle& handle, const ncclEpDispatchInputs_t& inputs,
                 const ncclEpDispatchOutputs_t& outputs);
void check_plain_combine(const ncclEpHandle& handle, const ncclEpCombineInputs_t& inputs, bool is_backward);
// Counters of a routing or, in low latency, of a dispatch: checked, not filled yet.
LayoutInfoParams take_counters(const ncclEpHandle& handle, const ncclEpLayoutInfo_t& given);
// Expert ids of a dispatch: they go to `target` in the library's own form, and `params` brings them into the caller's.
void take_ids(const ncclEpHandle& handle, const ncclEpLayoutInfo_t& given, Output& target, LayoutInfoParams& params);
// A handle on memory with the routing of another one.
void adopt_memory(ncclEpHandle& handle, int64_t num_tokens, int64_t num_rows);
// High throughput: exchanges the counts, and fills counters.
void route_plain(ncclEpHandle& handle, LayoutInfoParams counters, void* stream);
void write_info(const ncclEpHandle& handle, const LayoutInfoParams& params, void* stream);

// ---- High throughput (c_ht_dispatch.cc).

// A routing by itself. Fills info; of a handle of exact sizes also what it then knows of them.
void route(ncclEpHandle& handle, int32_t* info, void* stream);
void dispatch_ht(ncclEpHandle& handle, const DispatchCall& call, const Outputs& outputs, void* stream);

}  // namespace ep::c
