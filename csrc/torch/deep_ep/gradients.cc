// Gradients of the ops in DeepEP's convention, for callers that have no autograd function of their own. Those in two
// calls (hooks) have none.
#include <torch/library.h>

#include <tuple>

#include "torch/deep_ep/op_types.h"
#include "torch/ops/gradient_functions.h"

namespace ep {
namespace {

using namespace gradients;

using torch_ops::DeepEpDispatched;
using torch_ops::DeepEpNormal;

DeepEpNormal ht_dispatch_deepep(const Tensor& seq, const Tensor& x, const Optional& x_scales, const Tensor& topk_idx,
                                const Optional& topk_weights, int64_t num_experts, int64_t max_tokens, int64_t capacity,
                                int64_t num_sms) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ht_dispatch_deepep().call(seq, x, x_scales, topk_idx, topk_weights, num_experts, max_tokens,
                                                capacity, num_sms);
  };
  if (!wants_gradient(x, x_scales, topk_weights)) return run();
  DeepEpNormal made;
  const std::function<Sent()> send = [&]() -> Sent {
    made = run();
    const RoutingNumbers routing{num_experts, topk_idx.size(1), max_tokens, OutputLayout::kFlat};
    variable_list rows{std::get<0>(made)};
    if (x_scales) rows.push_back(std::get<1>(made));
    return {rows, std::get<3>(made),
            SavedRouting::of(seq, std::get<5>(made), std::get<6>(made), x.size(0), rows[0].size(0), routing)};
  };
  variable_list sent{x};
  if (x_scales) sent.push_back(*x_scales);
  const auto results = Dispatch::apply(at::TensorList(sent), topk_weights, at::TensorList(), send);
  std::get<0>(made) = results[0];
  if (x_scales) std::get<1>(made) = results[1];
  std::get<3>(made) = results.back();
  return made;
}

// ---- Low latency: the handle lies behind src_info

SavedRouting routing_of(const Tensor& seq, const Tensor& src_info, const Tensor& topk_idx, int64_t num_experts,
                        int64_t max_tokens) {
  const RoutingNumbers routing{num_experts, topk_idx.size(1), max_tokens, OutputLayout::kExpertMajor};
  const int64_t num_ranks = seq.size(1), capacity = num_ranks * max_tokens, num_tokens = topk_idx.size(0);
  const OutputShape output = output_shape(static_cast<int>(num_ranks), routing, capacity);
  const Tensor handle =
      src_info.as_strided({handle_shape(output, num_tokens).size()}, {1}, SourceShape::of(output).handle_at());
  return SavedRouting::of(seq, handle, {}, num_tokens, capacity, routing);
}

DeepEpDispatched ll_dispatch_deepep(const Tensor& seq, const Tensor& x, const Optional& x_scales,
                                    const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens, int64_t quant,
                                    const Optional& recv_stats, const Optional& wait_cost, int64_t num_sms) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ll_dispatch_deepep().call(seq, x, x_scales, topk_idx, num_experts, max_tokens, quant, recv_stats,
                                                wait_cost, num_sms);
  };
  if (!wants_gradient(x, x_scales)) return run();
  DeepEpDispatched made;
  const std::function<Sent()> send = [&]() -> Sent {
    made = run();
    variable_list rows{std::get<0>(made)};
    if (x_scales) rows.push_back(std::get<1>(made));
    return {rows, {}, routing_of(seq, std::get<4>(made), topk_idx, num_experts, max_tokens)};
  };
  variable_list sent{x};
  if (x_scales) sent.push_back(*x_scales);
  const auto results = Dispatch::apply(at::TensorList(sent), kNone, at::TensorList(), send);
  std::get<0>(made) = results[0];
  if (x_scales) std::get<1>(made) = results[1];
  return made;
}

Tensor ll_combine_deepep(const Tensor& seq, const Tensor& rows, const Tensor& src_info, const Tensor& weights,
                         const Tensor& topk_idx, int64_t num_experts, int64_t max_tokens, const Optional& wait_cost,
                         const Optional& out, int64_t num_sms, bool use_logfmt) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ll_combine_deepep().call(seq, rows, src_info, weights, topk_idx, num_experts, max_tokens,
                                               wait_cost, out, num_sms, use_logfmt);
  };
  variable_list written;
  if (out) written.push_back(*out);
  forget(written);
  if (!wants_gradient(rows, weights)) return run();
  const CombineGiven given{
      rows, topk_idx, {.weighting = Weighting::kHome}, routing_of(seq, src_info, topk_idx, num_experts, max_tokens)};
  Tensor made;
  const std::function<Combined()> combine = [&]() -> Combined {
    made = run();
    return {out ? *out : made, {}};
  };
  const auto results = Combine::apply(Optional(rows), kNone, Optional(weights), at::TensorList(),
                                      at::TensorList(written), given, combine);
  return out ? made : results[0];
}

}  // namespace
}  // namespace ep

TORCH_LIBRARY_IMPL(nccl_ep, Autograd, library) {
  library.impl("ht_dispatch_deepep", &ep::ht_dispatch_deepep);
  library.impl("ll_dispatch_deepep", &ep::ll_dispatch_deepep);
  library.impl("ll_combine_deepep", &ep::ll_combine_deepep);
}
