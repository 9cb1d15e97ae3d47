// What a buffer keeps for low latency, by the sizes of its calls: every road to a buffer asks here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout/ll/limits.h"
#include "runtime/group.h"
#include "runtime/policy.h"

namespace ep {

// The tokens of the largest call up to shape.max_tokens that "auto" gives to LL. On a GPU no more than LL's kernels
// serve of so many ranks.
inline int auto_ll_tokens(const Shape& shape, int64_t row_bytes, bool on_gpu) {
  int64_t most = most_auto_ll_tokens(row_bytes, shape.topk, shape.num_ranks);
  if (on_gpu) most = std::min<int64_t>(most, most_ll_tokens_on_gpus(shape));
  return static_cast<int>(std::clamp<int64_t>(most, 1, shape.max_tokens));
}

// sizes_for(). on_gpu: raises what kernels do not serve in any layout.
inline LlSizes ll_sizes_for(const Shape& shape, int dispatch_row_bytes, int combine_row_bytes, bool on_gpu) {
  if (on_gpu) check_ll_on_gpus(shape);
  return sizes_for(shape, dispatch_row_bytes, combine_row_bytes);
}

}  // namespace ep
