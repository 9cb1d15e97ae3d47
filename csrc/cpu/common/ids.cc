#include "cpu/common/ids.h"

#include <algorithm>

namespace ep {

void take_ids(const Shape& shape, const void* topk_idx, bool is_idx64, int num_tokens, int32_t* ids,
              InvalidIds* reported) {
  for (int i = 0; i < num_tokens * shape.topk; i++) {
    const int64_t id = id_at(topk_idx, is_idx64, i);
    ids[i] = shape.valid(id) ? static_cast<int32_t>(id) : -1;
    if (id == -1 || shape.valid(id) || reported == nullptr || reported->count++ > 0) continue;
    reported->value = id;
    reported->token = i / shape.topk;
    reported->k = i % shape.topk;
  }
}

void fill_info(const OutputShape& output, const Placement& placement, int32_t* info) {
  int64_t total = 0;
  for (int bin = 0; bin < output.bins(); bin++) {
    info[bin] = static_cast<int32_t>(placement.kept[bin]);
    info[output.demand_at() + bin] = static_cast<int32_t>(placement.demand[bin]);
    total += placement.kept[bin];
  }
  info[output.overflow_at()] = static_cast<int32_t>(placement.dropped);
  info[output.total_at()] = static_cast<int32_t>(total);
  for (int i = 0; i < output.num_offsets(); i++) {
    info[output.offsets_at() + i] = static_cast<int32_t>(std::min(placement.starts[i], output.capacity));
  }
}

void clear_row_info(const OutputShape& output, bool is_idx64, void* topk_idx, float* weights, int32_t* row_expert) {
  const int64_t rows = output.rows();
  const bool expert_rows = has_expert_rows(output.layout);
  const int64_t entries = expert_rows ? rows : rows * output.topk;
  std::fill(weights, weights + entries, 0.0f);
  if (row_expert != nullptr) std::fill(row_expert, row_expert + rows, -1);
  for (int64_t i = 0; !expert_rows && i < entries; i++) set_id(topk_idx, is_idx64, i, -1);
}

}  // namespace ep
