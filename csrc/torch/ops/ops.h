// What the ops of both modes share, beside run.h.
#pragma once

#include <array>
#include <initializer_list>

#include "base/check.h"
#include "runtime/checks.h"
#include "runtime/policy.h"
#include "torch/ops/arguments.h"
#include "torch/ops/device.h"
#include "torch/ops/run.h"

namespace ep {

inline CombineArgs combine_args(const at::Tensor& rows, const OptionalTensor& weights, const OptionalTensor& topk_idx,
                                at::TensorList biases) {
  EP_CHECK(rows.dim() >= 2, "rows have ", rows.dim(), " dimensions, must be shaped as dispatch's output");
  return {&rows, pointer_to(weights), pointer_to(topk_idx), biases, rows.size(-1), rows.scalar_type()};
}

// Types of a combine of rows.
template <class Params>
void set_types(Params& p, const CombineArgs& args) {
  p.dtype = dtype_of(args.rows_dtype);
  EP_CHECK(is_float(p.dtype) || p.dtype == DType::kF8E4M3, "rows is ", name_of(args.rows_dtype),
           ", must be torch.bfloat16, torch.float16 or torch.float32");
  p.hidden = to_int(args.hidden, "hidden");
  check_combined_types(p);
}

// Weights and ids of the home rank, of either mode.
template <class Params>
void set_weights(Params& p, const CombineArgs& args, const HandleInfo& spec, const at::Device& device) {
  EP_CHECK((args.weights != nullptr) == (p.options.weighting == Weighting::kHome),
           "weights of the home rank are given exactly when they are asked for");
  EP_CHECK(args.topk_idx == nullptr || p.options.weighting == Weighting::kHome,
           "topk_idx is given without weights [tokens, top-k]: at combine it goes with those");
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
void set_biases(Params& p, const CombineArgs& args, const HandleInfo& spec, at::ScalarType out_dtype,
                const at::Device& device) {
  EP_CHECK(args.biases.size() <= 2, args.biases.size(), " biases, at most 2");
  for (size_t i = 0; i < args.biases.size(); i++) {
    check_tensor(args.biases[i], "bias", out_dtype, {spec.num_tokens, args.hidden}, device);
    check_aligned(args.biases[i], "bias");
    p.bias[i] = args.biases[i].data_ptr();
  }
}

// Counters may lie one after the other, with further ones behind them. Of a packed output they do.
template <class Params>
void set_signals(Params& p, const at::Tensor* counters, const at::Device& device) {
  p.signals = signals_of(p.output, p.options, counters != nullptr);
  if (counters == nullptr) return;
  const at::ScalarType type = counters->scalar_type() == at::kUInt32 ? at::kUInt32 : at::kInt;
  const int64_t experts = p.signals.experts, each = p.signals.per_expert();
  if (counters->dim() == 1 && counters->size(0) >= experts * each) {
    check_tensor(*counters, "row_signals", type, {counters->size(0)}, device);
  } else if (p.signals.is_packed) {
    check_tensor(*counters, "row_signals", type, {each}, device);
  } else {
    check_tensor(*counters, "row_signals", type, {experts, each}, device);
  }
  p.signals.counters = static_cast<const uint32_t*>(counters->const_data_ptr());
}

// Where the result of a combine goes: to `given`, checked, or to a new tensor, which becomes `made`.
inline void* take_combined(const CombineArgs& args, std::initializer_list<const at::Tensor*> handle,
                           const HandleInfo& spec, at::ScalarType out_dtype, const at::Device& device,
                           const at::Tensor* given, at::Tensor& made) {
  const std::array<int64_t, 2> sizes{spec.num_tokens, args.hidden};
  if (given == nullptr) {
    made = new_tensor(sizes, out_dtype, device);
    return made.data_ptr();
  }
  check_tensor(*given, "out", out_dtype, sizes, device);
  check_aligned(*given, "out");
  AliasCheck aliases;
  aliases.reads("rows", args.rows);
  for (const at::Tensor* part : handle) aliases.reads("the handle", *part);
  aliases.reads("weights", args.weights);
  aliases.reads("topk_idx", args.topk_idx);
  for (const at::Tensor& bias :
       args.biases) {  // which may be the output itself: an element is read before it is written
    if (address_of(bias) != address_of(*given)) aliases.reads("bias", bias);
  }
  aliases.writes("out", *given);
  return given->data_ptr();
}

// The numbers of an operation, as runtime/options.h lists them. What a compiler may have as a symbol stays apart.
#define EP_DISPATCH_CONFIG_SCHEMA "SymInt capacity, int[] config"
#define EP_HANDLE_SCHEMA "SymInt num_tokens, SymInt capacity, int[] config"

inline DispatchConfig dispatch_config(at::IntArrayRef config) {
  return DispatchConfig::unpack({config.data(), config.size()});
}
inline CombineConfig combine_config(at::IntArrayRef config) {
  return CombineConfig::unpack({config.data(), config.size()});
}

}  // namespace ep
