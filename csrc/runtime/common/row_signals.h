#pragma once

#include <cstdint>

#include "base/check.h"

namespace ep {

// Counters of a kernel that still writes the rows of a combine, on another stream of the same device. A row may be read
// when its counter has reached the threshold. (int32, as the callers' tensors are.)
struct RowSignals {
  const uint32_t* counters = nullptr;  // [experts, per_expert()]; null: the rows are there
  int experts = 1;                     // local ones; 1: of a packed output, whose rows are counted as one expert's
  bool is_packed = false;
  int rows_per_expert = 1;  // of the dispatch's output
  int rows_per_signal = 1;  // at most rows_per_expert
  int threshold = 1;

  EP_HD int per_expert() const { return (rows_per_expert - 1) / rows_per_signal + 1; }
  // For a Failure; -1: of a packed output.
  EP_HD int expert_of(int row) const { return is_packed ? -1 : row / rows_per_expert; }
  EP_HD int row_block_of(int row) const { return row % rows_per_expert / rows_per_signal; }
  EP_HD const uint32_t* counter_of(int row) const {
    return counters + static_cast<int64_t>(row / rows_per_expert) * per_expert() + row_block_of(row);
  }
  EP_HD bool is_reached(uint32_t count) const { return static_cast<int32_t>(count) >= threshold; }
  // For a Failure.
  EP_HD uint64_t expected(int row) const {
    return static_cast<uint64_t>(row_block_of(row)) << 32 | static_cast<uint32_t>(threshold);
  }
};

}  // namespace ep
