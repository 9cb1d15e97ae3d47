#include "layout/common/routing.h"

namespace ep {
namespace {

// Calls visit(entry of the row map, bin) for every row in the order that defines places: (source, token, k).
template <class Visit>
void for_each_row(const Shape& shape, const OutputShape& output, const Routing& routing, Visit visit) {
  const bool expert_rows = has_expert_rows(output.layout);
  for (int source = 0; source < shape.num_ranks; source++) {
    for (int token = 0; token < routing.tokens[source]; token++) {
      const size_t slot = static_cast<size_t>(source) * shape.max_tokens + token;
      const int32_t* ids = routing.local_ids.data() + slot * shape.topk;
      bool is_here = false;
      for (int k = 0; k < shape.topk; k++) {
        is_here = is_here || ids[k] >= 0;
        if (expert_rows && ids[k] >= 0) visit(slot * shape.topk + k, ids[k]);
      }
      if (!expert_rows && is_here) visit(slot, source);
    }
  }
}

}  // namespace

void finish_bins(const OutputShape& output, Placement& placement) {
  const int bins = output.bins();
  placement.starts.assign(bins + 1, 0);
  for (int bin = 0; bin < bins; bin++) {
    placement.starts[bin + 1] = placement.starts[bin] + output.span(placement.demand[bin]);
    placement.kept.push_back(output.kept(placement.starts[bin], placement.demand[bin]));
    placement.dropped += placement.demand[bin] - placement.kept[bin];
  }
}

Placement place_rows(const Shape& shape, const OutputShape& output, const Routing& routing) {
  const int bins = output.bins();
  Placement placement;
  placement.row_map.assign(static_cast<size_t>(shape.num_ranks) * shape.max_tokens * output.map_k(), kNoRow);
  placement.demand.assign(bins, 0);
  for_each_row(shape, output, routing, [&](size_t, int bin) { placement.demand[bin]++; });
  finish_bins(output, placement);

  std::vector<int64_t> next(bins, 0);
  for_each_row(shape, output, routing, [&](size_t entry, int bin) {
    placement.row_map[entry] = output.row(bin, placement.starts[bin], next[bin]++);
  });
  return placement;
}

}  // namespace ep
