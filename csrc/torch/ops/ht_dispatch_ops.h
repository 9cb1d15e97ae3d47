// High-throughput dispatch for ops of other conventions.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "torch/ops/arguments.h"

namespace ep {

struct HtDispatched {
  at::Tensor x, scales, weights, topk_idx, info, route, slots;
  // Where sizes are exact:
  int64_t most_tokens;          // of any rank
  std::vector<int64_t> demand;  // of each local expert, of all ranks
};

// Of one tensor. A capacity of -1: exact sizes; then, if a rank has more tokens than max_tokens, all ranks get
// `most_tokens` alone, and nothing was sent.
HtDispatched dispatch_ht(const at::Tensor& seq, const at::Tensor& x, const OptionalTensor& x_scales,
                         const at::Tensor& topk_idx, const OptionalTensor& topk_weights, int64_t capacity,
                         const DispatchConfig& config);

}  // namespace ep
