// Expert ids and counts on their way in and out, for both modes.
#pragma once

#include <cstdint>

#include "cpu/common/state.h"
#include "layout/common/routing.h"

namespace ep {

// Copies ids [T, K] into a handle; one that names no expert counts as -1 and is reported, unless `reported` is null.
void take_ids(const Shape& shape, const void* topk_idx, bool is_idx64, int num_tokens, int32_t* ids,
              InvalidIds* reported);

inline int64_t id_at(const void* ids, bool is_idx64, int64_t index) {
  return is_idx64 ? static_cast<const int64_t*>(ids)[index] : static_cast<const int32_t*>(ids)[index];
}

inline void set_id(void* ids, bool is_idx64, int64_t index, int32_t id) {
  if (is_idx64) {
    static_cast<int64_t*>(ids)[index] = id;
  } else {
    static_cast<int32_t*>(ids)[index] = id;
  }
}

void fill_info(const OutputShape& output, const Placement& placement, int32_t* info);

// Sets the ids of all output rows to -1 and their weights to 0.
void clear_row_info(const OutputShape& output, bool is_idx64, void* topk_idx, float* weights, int32_t* row_expert);

}  // namespace ep
