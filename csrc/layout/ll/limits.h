// What low latency's kernels serve: limits that are known when a buffer is made.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "layout/common/shape.h"
#include "layout/common/wire.h"

namespace ep {

// Shared memory of a block that receives: the ids of all tokens of all ranks, and a bit for each token and local
// expert, or in rank layouts for each token. csrc/cuda/ll/common/geometry.h: RoutingBitmapShape has the rest, which is
// little.
constexpr int64_t kMostRoutingBytes = 220 * 1024;

// Of the layout that needs least.
inline int64_t least_routing_bytes(const Shape& shape, int64_t max_tokens) {
  const int64_t slots = shape.num_ranks * max_tokens;
  const int64_t words = IdFormat::make(shape.local_experts(), shape.topk).words();
  return 4 * (8 + slots * words + (slots / 32 | 1) + shape.num_ranks + 2);
}

// Tokens a rank that they serve in some layout.
inline int most_ll_tokens_on_gpus(const Shape& shape) {
  int64_t low = 0, high = kMostRoutingBytes;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (least_routing_bytes(shape, middle) <= kMostRoutingBytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return static_cast<int>(low);
}

inline void check_ll_on_gpus(const Shape& shape) {
  const int most = most_ll_tokens_on_gpus(shape);
  EP_CHECK(shape.max_tokens <= most, "max_tokens is ", shape.max_tokens, ", low latency of ", shape.num_ranks,
           " ranks and top-", shape.topk, " serves ", most,
           " on GPUs: make the buffer for as many, or for high "
           "throughput (mode=\"ht\")");
}

}  // namespace ep
