// Physical experts in place of logical ones (nccl_ep/placement). Of this rank alone: no buffer, no `seq`.
#include <torch/library.h>

#include "api/factory.h"
#include "torch/ops/device.h"
#include "torch/ops/fast_call.h"
#include "torch/ops/run.h"

namespace ep {
namespace {

using at::Tensor;

Tensor map_experts(const Tensor& topk_idx, const Tensor& logical_to_physical_map, const Tensor& logical_count,
                   int64_t rank, const OptionalTensor& load) {
  return guarded([&] {
    EP_CHECK(topk_idx.dim() == 2, "topk_idx has ", topk_idx.dim(), " dimensions, must be [tokens, top-k]");
    EP_CHECK(topk_idx.numel() <= INT32_MAX / 2, "topk_idx has ", topk_idx.numel(), " choices, at most ", INT32_MAX / 2);
    EP_CHECK(logical_to_physical_map.dim() == 2 && logical_to_physical_map.numel() > 0 &&
                 logical_to_physical_map.numel() <= INT32_MAX / 2,
             "logical_to_physical_map has shape ", logical_to_physical_map.sizes(),
             ", must be [logical experts, replicas]");
    EP_CHECK(rank >= 0 && rank <= INT32_MAX / 2, "rank is ", rank, ", must be 0 or more");
    const at::Device device = topk_idx.device();
    const c10::DeviceGuard on_device(device);
    const Tensor ids = topk_idx.contiguous();
    ExpertMapParams p;
    p.is_idx64 = ids.scalar_type() == at::kLong;
    check_tensor(ids, "topk_idx", p.is_idx64 ? at::kLong : at::kInt, ids.sizes(), device);
    p.num_tokens = static_cast<int>(ids.size(0));
    p.topk = static_cast<int>(ids.size(1));
    p.num_logical = static_cast<int>(logical_to_physical_map.size(0));
    p.max_replicas = static_cast<int>(logical_to_physical_map.size(1));
    p.rank = static_cast<int>(rank);
    check_tensor(logical_to_physical_map, "logical_to_physical_map", at::kLong, logical_to_physical_map.sizes(),
                 device);
    check_tensor(logical_count, "logical_count", at::kLong, {p.num_logical}, device);
    p.topk_idx = ids.data_ptr();
    p.physical_of = logical_to_physical_map.data_ptr<int64_t>();
    p.replicas_of = logical_count.data_ptr<int64_t>();
    if (load) {
      check_tensor(*load, "load", at::kLong, {p.num_logical}, device);
      AliasCheck aliases;
      aliases.reads("topk_idx", topk_idx);
      aliases.reads("logical_to_physical_map", logical_to_physical_map);
      aliases.reads("logical_count", logical_count);
      aliases.writes("load", *load);
      p.load = load->data_ptr<int64_t>();
    }
    const Tensor out = new_tensor(ids.sizes(), ids.scalar_type(), device);
    p.out = out.data_ptr();
    ep::map_experts(p, device.is_cuda(), launch_stream(device));
    return out;
  });
}

fast_call::Op expert_map_ops[] = {EP_OP(map_experts)};

}  // namespace
}  // namespace ep

TORCH_LIBRARY_FRAGMENT(nccl_ep, library) {
  library.def(
      "map_experts(Tensor topk_idx, Tensor logical_to_physical_map, Tensor logical_count, int rank, Tensor(a!)? load) "
      "-> Tensor");
}

EP_IMPLEMENT(expert_map_ops)
