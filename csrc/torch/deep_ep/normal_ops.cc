// High-throughput dispatch in the convention of DeepEP's normal mode: flat, with counts on the host. host_counts, where
// sizes are exact: most tokens of any rank, then the rows of each local expert [L]; if the first is above max_tokens,
// nothing was sent and the other results are empty. combine and the cached dispatch take the native ops:
// nccl_ep/deep_ep/v1/normal.py has the methods. token_layout is what get_dispatch_layout asks for.
#include <torch/library.h>

#include <algorithm>

#include "api/factory.h"
#include "torch/ops/device.h"
#include "torch/ops/fast_call.h"
#include "torch/ops/ht_dispatch_ops.h"
#include "torch/ops/registry.h"
#include "torch/ops/run.h"

namespace ep {
namespace {

using at::Tensor;
using DispatchResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Rows from each source to each destination [R, R], added up over the sources.
Tensor rank_prefix(const Tensor& route, int64_t num_ranks) {
  return route.narrow(0, 0, num_ranks * num_ranks).view({num_ranks, num_ranks}).cumsum(0, at::kInt);
}

DispatchResult ht_dispatch_deepep(const Tensor& seq, const Tensor& x, const OptionalTensor& x_scales,
                                  const Tensor& topk_idx, const OptionalTensor& topk_weights, int64_t num_experts,
                                  int64_t max_tokens, int64_t capacity, int64_t num_sms) {
  return guarded([&] {
    EP_CHECK(topk_idx.dim() == 2, "topk_idx has ", topk_idx.dim(), " dimensions, must be [tokens, top-k]");
    const DispatchConfig config{{num_experts, topk_idx.size(1), max_tokens, OutputLayout::kFlat},
                                {.num_sms = to_int(num_sms, "num_sms")}};
    const HtDispatched t = dispatch_ht(seq, x, x_scales, topk_idx, topk_weights, capacity, config);
    const at::Device host(at::kCPU);
    Tensor counts = new_tensor({capacity < 0 ? 1 + static_cast<int64_t>(t.demand.size()) : 0}, at::kLong, host);
    if (capacity < 0) {
      counts.data_ptr<int64_t>()[0] = t.most_tokens;
      std::copy(t.demand.begin(), t.demand.end(), counts.data_ptr<int64_t>() + 1);
    }
    if (!t.x.defined()) {
      const auto none = [&](at::ScalarType type) { return new_tensor({0}, type, x.device()); };
      return DispatchResult{none(x.scalar_type()),
                            none(x_scales ? x_scales->scalar_type() : at::kFloat),
                            none(topk_idx.scalar_type()),
                            none(at::kFloat),
                            none(at::kInt),
                            none(at::kInt),
                            none(at::kInt),
                            none(at::kInt),
                            counts};
    }
    const int64_t num_ranks = find_group(seq)->group->num_ranks();
    return DispatchResult{
        t.x, t.scales, t.topk_idx, t.weights, t.info, t.route, t.slots, rank_prefix(t.route, num_ranks), counts};
  });
}

// Of this rank alone: no buffer, no `seq`.
std::tuple<Tensor, Tensor> token_layout(const Tensor& topk_idx, int64_t num_ranks, int64_t num_domains,
                                        int64_t num_experts) {
  return guarded([&] {
    EP_CHECK(num_ranks > 0 && num_domains > 0 && num_ranks <= INT16_MAX && num_ranks % num_domains == 0, num_ranks,
             " ranks in ", num_domains, " domains");
    EP_CHECK(num_experts > 0 && num_experts <= INT32_MAX / 2 && num_experts % num_ranks == 0, num_experts,
             " experts do not divide over ", num_ranks, " ranks");
    EP_CHECK(topk_idx.dim() == 2, "topk_idx has ", topk_idx.dim(), " dimensions, must be [tokens, top-k]");
    EP_CHECK(topk_idx.numel() <= INT32_MAX / 2, "topk_idx has ", topk_idx.numel(), " choices, at most ", INT32_MAX / 2);
    const at::Device device = topk_idx.device();
    const c10::DeviceGuard on_device(device);
    const Tensor ids = topk_idx.contiguous();
    TokenLayoutParams p;
    p.is_idx64 = ids.scalar_type() == at::kLong;
    check_tensor(ids, "topk_idx", p.is_idx64 ? at::kLong : at::kInt, ids.sizes(), device);
    p.num_tokens = static_cast<int>(ids.size(0));
    p.shape = {static_cast<int>(num_ranks), static_cast<int>(num_experts), static_cast<int>(ids.size(1)), p.num_tokens};
    p.topology = {p.shape.num_ranks, static_cast<int>(num_ranks / num_domains)};
    p.topk_idx = ids.data_ptr();
    const Tensor counts = new_tensor({p.num_counts()}, at::kInt, device);
    const Tensor is_in_rank = new_tensor({p.num_tokens, num_ranks}, at::kBool, device);
    p.counts = counts.data_ptr<int32_t>();
    p.is_in_rank = is_in_rank.data_ptr<bool>();
    ep::token_layout(p, device.is_cuda(), launch_stream(device));
    return std::make_tuple(counts, is_in_rank);
  });
}

fast_call::Op deepep_normal_ops[] = {EP_OP(ht_dispatch_deepep), EP_OP(token_layout)};

}  // namespace
}  // namespace ep

TORCH_LIBRARY_FRAGMENT(nccl_ep, library) {
  library.def(
      "ht_dispatch_deepep(Tensor(a!) seq, Tensor x, Tensor? x_scales, Tensor topk_idx, Tensor? "
      "topk_weights, int num_experts, int max_tokens, int capacity, int num_sms) -> (Tensor x, Tensor scales, Tensor "
      "topk_idx, Tensor weights, Tensor info, Tensor route, Tensor slots, Tensor rank_prefix, Tensor host_counts)");
  library.def(
      "token_layout(Tensor topk_idx, int num_ranks, int num_domains, int num_experts) -> (Tensor counts, Tensor "
      "is_token_in_rank)");
}

EP_IMPLEMENT(deepep_normal_ops)
