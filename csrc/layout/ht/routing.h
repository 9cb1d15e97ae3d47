// From the counts that ranks exchange to the places of rows. Every rank knows the counts of all ranks, so each sender
// computes where its own rows go at every receiver. Host form; CUDA kernels reach the same places by ballots.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/common/outputs.h"
#include "layout/common/routing.h"
#include "layout/common/shape.h"
#include "layout/ht/handle.h"

namespace ep {

// What each source sends, from the op messages of all ranks.
struct HtCounts {
  std::vector<int32_t> rows;     // [R, R] tokens of a source with an expert of a destination
  std::vector<int32_t> choices;  // [R, E] choices of an expert

  static HtCounts zero(const Shape& shape) {
    const size_t ranks = shape.num_ranks;
    return {std::vector<int32_t>(ranks * ranks, 0), std::vector<int32_t>(ranks * shape.num_experts, 0)};
  }
  // Adds the tokens of one source.
  void count(const Shape& shape, int source, const int32_t* ids, int num_tokens);
};

// Slots of `destination` that come before those of `source`.
EP_HD int64_t first_slot(const int32_t* counts, int num_ranks, int source, int destination) {
  int64_t first = 0;
  for (int r = 0; r < source; r++) first += counts[r * num_ranks + destination];
  return first;
}

// The demand of `destination`, by its output's bins, and what of it fits. The row map stays empty.
Placement place_bins(const Shape& shape, const OutputShape& output, const HtCounts& counts, int destination);

// Fills in rows and slots of the tokens of `source` whose ids are given, at receivers with these outputs [R].
void place_tokens(const Shape& shape, const std::vector<OutputShape>& outputs, const HtCounts& counts, int source,
                  int num_tokens, const HtRoutes& routes);

}  // namespace ep
