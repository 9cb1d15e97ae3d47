// The ops of DeepEP's conventions, as torch/ops/op_types.h has the native ones.
#pragma once

#include "torch/ops/op_types.h"

namespace ep::torch_ops {

using DeepEpNormal = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using DeepEpDispatched = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using TokenLayout = std::tuple<Tensor, Tensor>;

EP_OP_HANDLE(ht_dispatch_deepep, DeepEpNormal, const Tensor& seq, const Tensor& x, const Optional& x_scales,
             const Tensor& topk_idx, const Optional& topk_weights, int64_t num_experts, int64_t max_tokens,
             int64_t capacity, int64_t num_sms)
EP_OP_HANDLE(token_layout, TokenLayout, const Tensor& topk_idx, int64_t num_ranks, int64_t num_domains,
             int64_t num_experts)

#define EP_DISPATCH_ARGS                                                                                     \
  const Tensor &seq, const Tensor &x, const Optional &x_scales, const Tensor &topk_idx, int64_t num_experts, \
      int64_t max_tokens, int64_t quant, const Optional &recv_stats, const Optional &wait_cost, int64_t num_sms
#define EP_COMBINE_ARGS                                                                                         \
  const Tensor &seq, const Tensor &rows, const Tensor &src_info, const Tensor &weights, const Tensor &topk_idx, \
      int64_t num_experts, int64_t max_tokens, const Optional &wait_cost, const Optional &out, int64_t num_sms, \
      bool use_logfmt
EP_OP_HANDLE(ll_dispatch_deepep, DeepEpDispatched, EP_DISPATCH_ARGS)
EP_OP_HANDLE(ll_dispatch_deepep_send, DeepEpDispatched, EP_DISPATCH_ARGS)
EP_OP_HANDLE(ll_dispatch_deepep_recv, void, const Tensor& seq, const Tensor& x, const Tensor& scales,
             const Tensor& weights, const Tensor& counts, const Tensor& src_info, const Tensor& layout_range,
             at::ScalarType dtype, int64_t num_tokens, int64_t topk, bool is_idx64, int64_t num_experts,
             int64_t max_tokens, int64_t quant, const Optional& recv_stats, const Optional& wait_cost, int64_t num_sms)
EP_OP_HANDLE(ll_combine_deepep, Tensor, EP_COMBINE_ARGS)
EP_OP_HANDLE(ll_combine_deepep_send, Tensor, EP_COMBINE_ARGS, const Optional& row_signals, int64_t rows_per_signal,
             int64_t signal_threshold)
EP_OP_HANDLE(ll_combine_deepep_recv, void, const Tensor& seq, const Tensor& src_info, int64_t topk, int64_t num_experts,
             int64_t max_tokens, const Optional& wait_cost, const Tensor& out, int64_t num_sms, bool use_logfmt)
#undef EP_DISPATCH_ARGS
#undef EP_COMBINE_ARGS

}  // namespace ep::torch_ops
