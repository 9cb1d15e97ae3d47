// What a recording counts of an operation on its GPU (nccl_ep.record): one small kernel behind the operation, of this
// rank alone, for both modes.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "layout/common/shape.h"

namespace ep {

struct ObservedCounts {
  // Of these it is counted: [T, K] experts of the own tokens. Null with tokens: `rows`.
  const void* ids = nullptr;
  bool is_idx64 = false;
  int num_tokens = 0;
  Shape shape;
  bool has_row_per_choice = false;  // else a row for each rank that has an expert of the token
  bool has_choices = false;         // the choices of each expert are wanted
  const int32_t* rows = nullptr;    // [R], counted already
  Divisor by_local_experts{};       // set by the launch
  // [R rows, E choices], read by the host: each a count with `tag` in its upper half, which says that it is there.
  uint64_t* out = nullptr;
  uint32_t tag = 0;

  EP_HD int num_words() const { return shape.num_ranks + (has_choices ? shape.num_experts : 0); }
  // More are not counted: a block has them in shared memory that need not be asked for.
  bool can_be_counted() const { return num_words() <= static_cast<int>((48 << 10) / sizeof(int32_t)); }
};

void load_observed_counts_kernels();
void launch_observed_counts(ObservedCounts counts, void* stream);

}  // namespace ep
