// The arguments of the dispatch and combine ops as the library's structs, and the tensors they need.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "runtime/checks.h"
#include "runtime/ll/params.h"
#include "runtime/options.h"
#include "torch/ops/alias_check.h"

namespace ep {

using OptionalTensor = std::optional<at::Tensor>;

std::string name_of(at::ScalarType type);  // as Python has it
DType dtype_of(at::ScalarType type);
at::ScalarType float_type_of(DType dtype);  // of what combine adds up

// The parts of x that the receive must know without x.
struct InputTypes {
  at::ScalarType dtype;
  int64_t hidden;
  int64_t num_scales;  // given by the caller; 0: none
  at::ScalarType scale_dtype;
  int64_t num_tokens, topk;
  bool is_idx64;
};

// Sizes and types of every output; tensors that a layout has not got are empty. Int: int64_t, or SymInt for fakes.
template <class Int>
struct OutputTypesOf {
  c10::SmallVector<Int, 3> x, scales, weights, topk_idx, row_expert, info;
  at::ScalarType x_type, scales_type, idx_type;
};
using OutputTypes = OutputTypesOf<int64_t>;
template <class Int>
OutputTypesOf<Int> output_types(const OutputShape& output, Int capacity, Quant quant, at::ScalarType dtype, Int hidden,
                                Int num_scales, at::ScalarType scale_dtype, bool is_idx64);
OutputTypes output_types(const InputTypes& inputs, Quant quant, const OutputShape& output);

struct DispatchTensors {
  at::Tensor x, scales, weights, topk_idx, row_expert, info, handle;
};
// An op runs without the interpreter's lock, and a copy of a tensor that Python alone owned takes it, twice.
struct DispatchRefs {
  const at::Tensor &x, &scales, &weights, &topk_idx, &row_expert, &info, &handle;

  static DispatchRefs of(const DispatchTensors& t) {
    return {t.x, t.scales, t.weights, t.topk_idx, t.row_expert, t.info, t.handle};
  }
};

// Refuses sizes that make no sense.
OutputShape output_shape(int num_ranks, const RoutingNumbers& routing, int64_t capacity);
at::DimVector row_shape(const OutputShape& output, int64_t last);  // of the rows, with `last` in place of H
at::DimVector values_shape(const OutputShape& output);             // one number a row, in rank layouts one a choice
HandleShape handle_shape(const OutputShape& output, int64_t num_tokens);

// Null of a tensor that is empty, or that there is not.
template <class T>
T* pointer(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<T*>(tensor.data_ptr());
}

// What a caller gives as scales: those of rows, or the one of the tensor that NVFP4 takes; none is left out or null.
const OptionalTensor& row_scales_of(const OptionalTensor& given, Quant quant);
const float* tensor_scale_of(const OptionalTensor& given, Quant quant, const at::Device& device);
// Refuses tensors that the kernels could not read. `device`: of the group. `check_rows`: of [T, H] without routing.
InputTypes check_rows(const at::Tensor& x, const OptionalTensor& scales, const at::Device& device);
InputTypes check_inputs(const at::Tensor& x, const OptionalTensor& scales, const at::Tensor& topk_idx,
                        const OptionalTensor& topk_weights, int64_t topk, const at::Device& device);
void check_tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes,
                  const at::Device& device);
void check_whole(const at::Tensor& tensor, const char* name);    // aligned to its elements; check_tensor() has it
void check_aligned(const at::Tensor& tensor, const char* name);  // to 16 bytes
void require_ids(const at::Tensor& tensor, const char* name);    // of experts: their dtype

at::Tensor allocate_handle(const InputTypes& row, const OutputShape& output, const at::Device& device);
DispatchTensors allocate_outputs(const InputTypes& row, Quant quant, const OutputShape& output,
                                 const at::Device& device, bool with_handle);
// `aliases`: knows what the call reads.
void check_outputs(const DispatchRefs& given, const InputTypes& row, Quant quant, const OutputShape& output,
                   const at::Device& device, AliasCheck& aliases);

// Everything but pointers; those are set below.
LlDispatchParams dispatch_params(const InputTypes& row, const DispatchConfig& config, const OutputShape& output);
void set_inputs(LlDispatchParams& params, const at::Tensor& x, const OptionalTensor& scales, const at::Tensor& topk_idx,
                const OptionalTensor& topk_weights);
void set_handle(LlDispatchParams& params, const at::Tensor& handle);
void set_outputs(LlDispatchParams& params, const DispatchRefs& tensors);

}  // namespace ep
