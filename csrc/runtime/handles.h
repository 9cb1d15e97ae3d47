// Handles in host memory are read before they are trusted: anybody may have changed them, and their entries become
// addresses. Kernels of CUDA skip what does not exist.
#pragma once

#include "layout/common/outputs.h"
#include "layout/common/topology.h"
#include "runtime/ht/params.h"
#include "runtime/ll/params.h"

namespace ep {

// Throws kInvalidArgument with the first entry that cannot be of these sizes.
void check_handle(const HandlePtrs& handle, const OutputShape& output, const Shape& shape, int num_tokens);

// What high throughput reads of a handle in a call of `rank`. `writes_slots`: the call fills them.
void check_handle(const HtHandlePtrs& handle, const OutputShape& output, const Shape& shape, const Topology& topology,
                  int num_tokens, int rank, bool writes_slots);

}  // namespace ep
