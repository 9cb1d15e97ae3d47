// Counts and expert ids in the form that NCCL EP's callers have them in: made of what an operation has left, by a rank
// by itself.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "base/platform.h"

namespace ep {

// Integers of either size.
struct Integers {
  void* data = nullptr;  // null: none
  bool is_64 = false;

  EP_HD int64_t get(int64_t i) const {
    return is_64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  EP_HD void set(int64_t i, int64_t value) const {
    if (is_64) {
      static_cast<int64_t*>(data)[i] = value;
    } else {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    }
  }
};

struct LayoutInfoParams {
  const int32_t* counts = nullptr;  // [num_counts], each brought to a multiple of `alignment`
  int num_counts = 0;
  int alignment = 1;
  int64_t limit = INT64_MAX;      // of their sum: what is behind it counts for nothing
  const int32_t* rows = nullptr;  // [num_rows], whose sum is the total; null: that is the sum of the counts
  int num_rows = 0;
  Integers counters, offsets, total;  // out: the counts, the sums before each, the total without the limit

  Integers ids, out_ids;  // [num_ids] from -1; may be the same
  int64_t num_ids = 0;
  int first_expert = 0;  // is added to those from 0 on
  bool is_mask = false;  // ids are flags, and become their opposites

  bool has_work() const {
    return counters.data != nullptr || offsets.data != nullptr || total.data != nullptr || num_ids > 0;
  }

  EP_HD void write_counts() const {
    int64_t sum = 0;
    for (int i = 0; i < num_counts; i++) {
      const int64_t start = sum < limit ? sum : limit;
      sum += align_up<int64_t>(counts[i], alignment);
      if (counters.data != nullptr) counters.set(i, (sum < limit ? sum : limit) - start);
      if (offsets.data != nullptr) offsets.set(i, start);
    }
    if (total.data == nullptr) return;
    if (rows != nullptr) {
      sum = 0;
      for (int i = 0; i < num_rows; i++) sum += rows[i];
    }
    total.set(0, sum);
  }
  EP_HD void write_id(int64_t i) const {
    const int64_t id = ids.get(i);
    if (is_mask) return out_ids.set(i, id == 0 ? 1 : 0);
    out_ids.set(i, id < 0 ? id : id + first_expert);
  }
};

}  // namespace ep
