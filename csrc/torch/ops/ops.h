// What the ops of both modes share, beside run.h.
#pragma once

#include <array>
#include <initializer_list>

#include "base/check.h"
#include "torch/ops/arguments.h"
#include "torch/ops/device.h"
#include "torch/ops/run.h"

namespace ep {

#define EP_DISPATCH_CONFIG                                                                                     \
  int64_t num_experts, int64_t max_tokens, int64_t layout, int64_t capacity, int64_t alignment, int64_t quant, \
      bool zero_padding, int64_t num_sms
#define EP_DISPATCH_SPEC \
  DispatchConfig { num_experts, max_tokens, layout, capacity, alignment, quant, zero_padding, num_sms }

#define EP_HANDLE_ARGS \
  int64_t num_tokens, int64_t topk, int64_t num_experts, int64_t max_tokens, int64_t layout, int64_t capacity
#define EP_HANDLE_SPEC \
  HandleConfig { num_tokens, topk, num_experts, max_tokens, layout, capacity }

// Whether the host may read what a handle has. Emulated GPUs stand for those whose memory it cannot read.
inline bool can_look_through([[maybe_unused]] const at::Device& device) {
#ifdef EP_EMULATED_GPU
  return false;
#else
  return device.is_cpu();
#endif
}

// Values of a handle in host memory.
inline void check_handle_values(const int32_t* values, int64_t count, int64_t first, int64_t last, const char* name) {
  for (int64_t i = 0; i < count; i++) {
    EP_CHECK(values[i] >= first && values[i] <= last, "the handle is not of these sizes, or was changed: ", name, " ",
             i, " is ", values[i], ", must be ", first, " to ", last);
  }
}

inline CombineArgs combine_args(const at::Tensor& rows, const OptionalTensor& weights, const OptionalTensor& topk_idx,
                                at::TensorList biases, int64_t weighting, at::ScalarType out_dtype,
                                at::ScalarType wire_dtype, int64_t num_sms) {
  EP_CHECK(rows.dim() >= 2, "rows have ", rows.dim(), " dimensions, must be shaped as dispatch's output");
  return {&rows,
          pointer_to(weights),
          pointer_to(topk_idx),
          biases,
          rows.size(-1),
          weighting,
          rows.scalar_type(),
          out_dtype,
          wire_dtype,
          num_sms};
}

// Weights and ids of the home rank, of either mode.
template <class Params>
void set_weights(Params& p, const CombineArgs& args, const HandleConfig& spec, const at::Device& device) {
  EP_CHECK((args.weights != nullptr) == (p.weighting == Weighting::kHome),
           "weights of the home rank are given exactly when they are asked for");
  EP_CHECK(args.topk_idx == nullptr || p.weighting == Weighting::kHome,
           "topk_idx at combine goes with weights of the home rank");
  if (args.weights != nullptr) {
    check_tensor(*args.weights, "weights", at::kFloat, {spec.num_tokens, spec.topk}, device);
    p.home_weights = args.weights->data_ptr<float>();
  }
  if (args.topk_idx != nullptr) {
    p.is_idx64 = args.topk_idx->scalar_type() == at::kLong;
    check_tensor(*args.topk_idx, "topk_idx", p.is_idx64 ? at::kLong : at::kInt, {spec.num_tokens, spec.topk}, device);
    p.home_topk_idx = args.topk_idx->data_ptr();
  }
}

template <class Params>
void set_biases(Params& p, const CombineArgs& args, const HandleConfig& spec, const at::Device& device) {
  EP_CHECK(args.biases.size() <= 2, args.biases.size(), " biases, at most 2");
  for (size_t i = 0; i < args.biases.size(); i++) {
    check_tensor(args.biases[i], "bias", args.out_dtype, {spec.num_tokens, args.hidden}, device);
    check_aligned(args.biases[i], "bias");
    p.bias[i] = args.biases[i].data_ptr();
  }
}

// Where the result of a combine goes: to `given`, checked, or to a new tensor, which becomes `made`.
inline void* take_combined(const CombineArgs& args, std::initializer_list<const at::Tensor*> handle,
                           const HandleConfig& spec, const at::Device& device, const at::Tensor* given,
                           at::Tensor& made) {
  const std::array<int64_t, 2> sizes{spec.num_tokens, args.hidden};
  if (given == nullptr) {
    made = new_tensor(sizes, args.out_dtype, device);
    return made.data_ptr();
  }
  check_tensor(*given, "out", args.out_dtype, sizes, device);
  check_aligned(*given, "out");
  AliasCheck aliases;
  aliases.reads("rows", args.rows);
  for (const at::Tensor* part : handle) aliases.reads("the handle", *part);
  aliases.reads("weights", args.weights);
  aliases.reads("topk_idx", args.topk_idx);
  for (const at::Tensor& bias :
       args.biases) {  // which may be the output itself: an element is read before it is written
    if (bias.const_data_ptr() != given->const_data_ptr()) aliases.reads("bias", bias);
  }
  aliases.writes("out", *given);
  return given->data_ptr();
}

#define EP_DISPATCH_CONFIG_SCHEMA                                                                                \
  "int num_experts, int max_tokens, int layout, int capacity, int alignment, int quant, bool zero_padding, int " \
  "num_sms"
#define EP_HANDLE_SCHEMA "SymInt num_tokens, int topk, int num_experts, int max_tokens, int layout, SymInt capacity"

}  // namespace ep
