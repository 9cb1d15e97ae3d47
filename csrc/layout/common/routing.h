// From the experts that tokens choose to the places of their rows. Host form: plain loops over (source, token, k). The
// CUDA kernels reach the same places by bitmaps and counted bits.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/common/outputs.h"
#include "layout/common/shape.h"

namespace ep {

// Which of this rank's experts the tokens of every source rank choose.
struct Routing {
  std::vector<int32_t> tokens;     // [R] tokens of each source
  std::vector<int32_t> local_ids;  // [R, M, K] expert of this rank, or -1

  static Routing empty(const Shape& shape) {
    Routing routing;
    routing.tokens.assign(shape.num_ranks, 0);
    routing.local_ids.assign(static_cast<size_t>(shape.num_ranks) * shape.max_tokens * shape.topk, -1);
    return routing;
  }
};

struct Placement {
  std::vector<int32_t> row_map;  // [R, M, map_k]: output row, kNoRow or kDroppedRow
  std::vector<int64_t> demand;   // [bins] rows that were asked for
  std::vector<int64_t> kept;     // [bins] rows in the tensor
  std::vector<int64_t> starts;   // [bins + 1] first row of each bin, before clamping to the capacity
  int64_t dropped = 0;
};

// Starts, kept and dropped rows of bins whose demand is known.
void finish_bins(const OutputShape& output, Placement& placement);

Placement place_rows(const Shape& shape, const OutputShape& output, const Routing& routing);

}  // namespace ep
