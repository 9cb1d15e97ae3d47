// The ops that other ops call, by way of torch's dispatcher: a compiler sees the calls, and gradients have gradients.
// Lengths are SymInts.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>

namespace ep::torch_ops {

using at::Tensor;
using c10::SymInt;
using Optional = std::optional<Tensor>;
using LlDispatched = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using HtDispatched = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using HtCombined = std::tuple<Tensor, Tensor>;
using HtCached = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

using HtRouted = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using LlReceived = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

#define EP_OP_HANDLE(name, Result, ...)                                                                     \
  inline auto& name() {                                                                                     \
    static const auto op =                                                                                  \
        c10::Dispatcher::singleton().findSchemaOrThrow("nccl_ep::" #name, "").typed<Result(__VA_ARGS__)>(); \
    return op;                                                                                              \
  }

EP_OP_HANDLE(ll_dispatch, LlDispatched, const Tensor& seq, const Tensor& x, const Optional& x_scales,
             const Tensor& topk_idx, const Optional& topk_weights, SymInt capacity, at::IntArrayRef config)
EP_OP_HANDLE(ll_combine, Tensor, const Tensor& seq, const Tensor& rows, const Tensor& handle, const Optional& weights,
             const Optional& topk_idx, at::TensorList biases, SymInt num_tokens, SymInt capacity,
             at::IntArrayRef config)
EP_OP_HANDLE(ll_combine_weights, Tensor, const Tensor& seq, const Tensor& values, const Tensor& handle,
             SymInt num_tokens, SymInt capacity, at::IntArrayRef config)
EP_OP_HANDLE(ht_dispatch, HtDispatched, const Tensor& seq, at::TensorList xs, const Optional& x_scales,
             const Tensor& topk_idx, const Optional& topk_weights, SymInt capacity, at::IntArrayRef config)
EP_OP_HANDLE(ht_dispatch_cached, HtCached, const Tensor& seq, at::TensorList xs, const Optional& x_scales,
             const Tensor& route, const Tensor& slots, SymInt num_tokens, SymInt capacity, at::IntArrayRef config)
EP_OP_HANDLE(ht_combine, HtCombined, const Tensor& seq, const Optional& rows, const Optional& values,
             const Tensor& route, const Tensor& slots, const Optional& weights, const Optional& topk_idx,
             at::TensorList biases, SymInt num_tokens, SymInt capacity, at::IntArrayRef config)
EP_OP_HANDLE(ll_dispatch_recv, LlReceived, const Tensor& seq, const Tensor& handle, at::ScalarType dtype, SymInt hidden,
             SymInt num_scales, at::ScalarType scale_dtype, SymInt num_tokens, bool is_idx64, SymInt capacity,
             at::IntArrayRef config, const Optional& x, const Optional& topk_weights)
EP_OP_HANDLE(ll_combine_out, void, const Tensor& seq, const Tensor& rows, const Tensor& handle, const Optional& weights,
             const Optional& topk_idx, at::TensorList biases, SymInt num_tokens, SymInt capacity,
             at::IntArrayRef config, const Tensor& out)
EP_OP_HANDLE(ll_combine_recv, Tensor, const Tensor& seq, const Tensor& handle, at::TensorList biases,
             at::ScalarType rows_dtype, SymInt hidden, SymInt num_tokens, SymInt capacity, at::IntArrayRef config,
             const Optional& carrier, const Optional& rows, const Optional& weights, const Optional& topk_idx)
EP_OP_HANDLE(ht_dispatch_out, void, const Tensor& seq, at::TensorList xs, const Optional& x_scales,
             const Tensor& topk_idx, const Optional& topk_weights, SymInt capacity, at::IntArrayRef config,
             at::TensorList out_xs, const Tensor& out_scales, const Tensor& out_weights, const Tensor& out_topk_idx,
             const Tensor& out_row_expert, const Tensor& out_info, const Tensor& out_route, const Tensor& out_slots)
EP_OP_HANDLE(ht_dispatch_cached_out, void, const Tensor& seq, at::TensorList xs, const Optional& x_scales,
             const Tensor& route, const Tensor& slots, SymInt num_tokens, SymInt capacity, at::IntArrayRef config,
             at::TensorList out_xs, const Tensor& out_scales)
EP_OP_HANDLE(ht_dispatch_routed, HtRouted, const Tensor& seq, at::TensorList xs, const Optional& x_scales,
             const Tensor& topk_idx, const Optional& topk_weights, const Tensor& info, const Tensor& route,
             SymInt num_rows, SymInt num_slots, at::IntArrayRef config)
EP_OP_HANDLE(ht_combine_out, void, const Tensor& seq, const Optional& rows, const Optional& values, const Tensor& route,
             const Tensor& slots, const Optional& weights, const Optional& topk_idx, at::TensorList biases,
             SymInt num_tokens, SymInt capacity, at::IntArrayRef config, const Tensor& out)
EP_OP_HANDLE(require_no_overflow, void, const Tensor& seq, const Tensor& info, SymInt capacity, at::IntArrayRef config)
EP_OP_HANDLE(carrier, Tensor, const Tensor& x)
EP_OP_HANDLE(carried, Tensor, const Tensor& carrier, const Tensor& values)
EP_OP_HANDLE(row_carrier, Tensor, const Tensor& seq, const Tensor& x, const Tensor& handle, const Optional& slots,
             at::SymIntArrayRef sizes, at::IntArrayRef config)

}  // namespace ep::torch_ops

// Those with a gradient: in gradients.cc, and in csrc/torch/deep_ep/gradients.cc. The backward of any other raises an
// error.
#define EP_OPS_WITH_GRADIENT(OP) \
  OP(ll_dispatch)                \
  OP(ll_dispatch_recv)           \
  OP(ll_combine)                 \
  OP(ll_combine_out)             \
  OP(ll_combine_recv)            \
  OP(ll_combine_weights)         \
  OP(ht_dispatch)                \
  OP(ht_dispatch_out)            \
  OP(ht_dispatch_routed)         \
  OP(ht_dispatch_cached)         \
  OP(ht_dispatch_cached_out)     \
  OP(ht_combine)                 \
  OP(ht_combine_out)
#define EP_DEEPEP_OPS_WITH_GRADIENT(OP) \
  OP(ht_dispatch_deepep)                \
  OP(ll_dispatch_deepep)                \
  OP(ll_combine_deepep)
