// Ranks of a world on one GPU share a launch.
#pragma once

#include "base/check.h"
#include "runtime/ll/params.h"

namespace ep {

// The parameters of rank 0, and of `rank`.
inline void check_same_kernel(const LlCombineParams& first, const LlCombineParams& other, int rank) {
  EP_CHECK((other.options.weighting == Weighting::kHome) == (first.options.weighting == Weighting::kHome),
           "of ranks 0 and ", rank, " one gives its weights at combine: in a world on one GPU all must, or none");
  EP_CHECK(other.sends_unweighted == first.sends_unweighted, "of ranks 0 and ", rank,
           " one splits its combine: in a world on one GPU all must, or none");
}

}  // namespace ep
