// What a recording adds to an operation on its GPU whose own kernels do not write it (nccl_ep.record): two small
// kernels of this rank alone. That before it writes the time; that behind it the time, and what it counts. They are
// launched as the operations are, programmatically, so that an operation's launch overlaps with them. Events would cost
// that, too.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "layout/common/shape.h"
#include "runtime/common/recorded_words.h"

namespace ep {

struct ObservedCounts {
  // Of these it is counted: [T, K] experts of the own tokens.
  const void* ids = nullptr;
  bool is_idx64 = false;
  int num_tokens = 0;
  Shape shape;
  bool has_row_per_choice = false;  // else a row for each rank that has an expert of the token
  bool has_choices = false;         // the choices of each expert are wanted
  const int32_t* rows = nullptr;    // [R], counted already; else by the ids
  bool has_rows = true;             // else only the time is written
  RecordedWords recorded;           // of which the time is the only block's end
  bool has_time = true;             // is wanted
  Divisor by_local_experts{};       // set by the launch

  EP_HD int num_words() const { return has_rows ? shape.num_ranks + (has_choices ? shape.num_experts : 0) : 0; }
  // More are not counted: a block has them in shared memory that need not be asked for.
  bool can_be_counted() const { return num_words() <= static_cast<int>((48 << 10) / sizeof(int32_t)); }
};

void load_observed_counts_kernels();
void launch_observed_time(uint64_t* time_ns, void* stream);
void launch_observed_counts(ObservedCounts counts, void* stream);

}  // namespace ep
