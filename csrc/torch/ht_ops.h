// High-throughput dispatch for ops of other conventions.
#pragma once

#include <ATen/ATen.h>

#include <string_view>
#include <vector>

#include "torch/spec.h"

namespace ep {

struct HtDispatched {
  at::Tensor x, scales, weights, topk_idx, info, route, slots;
  std::vector<int64_t> demand;  // of each local expert, of all ranks; empty where the capacity is given
};

// Of one tensor. A capacity of -1: exact sizes.
HtDispatched dispatch_ht(std::string_view buffer, const at::Tensor& x, const OptionalTensor& x_scales,
                         const at::Tensor& topk_idx, const OptionalTensor& topk_weights, const DispatchSpec& spec);

}  // namespace ep
