// A dispatch as the caller has described it, whichever algorithm runs it.
#pragma once

#include <array>

#include "api/c_objects.h"
#include "api/c_tensor.h"
#include "runtime/options.h"

namespace ep::c {

// What ncclEpDispatchInputs_t and ncclEpDispatchConfig_t say. Sizes and types are checked, memory is not.
struct DispatchCall {
  ncclEpDispatchConfig_t config;
  Tensor tokens, weights, scales;
  std::array<Tensor, NCCL_EP_MAX_EXTRA> extra;
  DispatchOptions options;
  DType dtype = DType::kBF16;  // of tokens
  int hidden = 0;
  int num_scales = 0, scale_bytes = 4;  // of an output row, and of one of them
};

// An output as it must be; ndim 0: the call has none.
struct Output {
  const char* name;
  ncclEpTensor_t* given;  // may be null
  ncclEpDataType_t dtype;
  Sizes sizes;
};
enum { kTokens, kScales, kWeights, kIdx, kRowExpert, kInfo, kExtra, kNumOutputs = kExtra + NCCL_EP_MAX_EXTRA };
using Outputs = std::array<Output, kNumOutputs>;
using OutputPointers = std::array<void*, kNumOutputs>;  // null where the call has none, or it has no elements

DispatchCall take_call(const ncclEpHandle& handle, const ncclEpDispatchInputs_t* inputs,
                       const ncclEpDispatchConfig_t* config);
// Their memory, for the tokens of the handle's ids, or, cached, of its dispatch.
void check_inputs(const DispatchCall& call, const ncclEpHandle& handle, int num_tokens);
Outputs outputs_of(const DispatchCall& call, const ncclEpHandle& handle, const ncclEpDispatchOutputs_t& given);
OutputPointers take_outputs(const Outputs& outputs);
// Refuses outputs that overlap what the call reads, or one another.
void check_apart(const DispatchCall& call, const ncclEpHandle& handle, const Outputs& outputs,
                 const OutputPointers& pointers);

Sizes row_sizes(const OutputShape& output);  // the leading ones of tensors of rows

// High throughput (c_ht_dispatch.cc).
void dispatch_ht(ncclEpHandle& handle, const DispatchCall& call, const Outputs& outputs, void* stream);

}  // namespace ep::c
