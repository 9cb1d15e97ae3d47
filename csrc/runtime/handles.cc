#include "runtime/handles.h"

#include "base/check.h"

namespace ep {
namespace {

void check_values(const int32_t* values, int64_t count, int64_t first, int64_t last, const char* name) {
  for (int64_t i = 0; i < count; i++) {
    EP_CHECK(values[i] >= first && values[i] <= last, "the handle is not of these sizes, or was changed: ", name, " ",
             i, " is ", values[i], ", must be ", first, " to ", last);
  }
}

int64_t most_slots(const OutputShape& output) { return static_cast<int64_t>(output.num_ranks) * output.max_tokens; }

void check_routes(const HtRoutes& routes, int64_t first, int64_t count, const OutputShape& output, const Shape& shape) {
  check_values(routes.ids + first, count, -1, shape.num_experts - 1, "expert id");
  check_values(routes.rows + first, count, kDroppedRow, INT32_MAX, "row");
  check_values(routes.slots + first, count, kNoRow, most_slots(output) - 1, "slot");
}

}  // namespace

void check_handle(const HandlePtrs& handle, const OutputShape& output, const Shape& shape, int num_tokens) {
  check_values(handle.tokens, output.num_ranks, 0, output.max_tokens, "number of tokens");
  check_values(handle.ids, static_cast<int64_t>(num_tokens) * output.topk, -1, shape.num_experts - 1, "expert id");
  check_values(handle.rows, most_slots(output) * output.map_k(), kDroppedRow, output.rows() - 1, "row");
}

void check_handle(const HtHandlePtrs& handle, const OutputShape& output, const Shape& shape, const Topology& topology,
                  int num_tokens, int rank, bool writes_slots) {
  const int ranks = output.num_ranks;
  check_values(handle.counts, static_cast<int64_t>(ranks) * ranks, 0, output.max_tokens, "number of rows");
  int64_t received = 0;
  for (int r = 0; r < ranks; r++) received += handle.counts[r * ranks + rank];
  // Rank layouts need no slots to find a row: a capacity below what came has dropped those of the rows that it dropped.
  const bool expert_rows = has_expert_rows(output.layout);
  EP_CHECK(received <= handle.num_slots || !(expert_rows || writes_slots),
           "the handle is not of these sizes, or was changed: ", received, " rows in slots for ", handle.num_slots);
  check_routes(handle.own, 0, static_cast<int64_t>(num_tokens) * output.topk, output, shape);
  if (writes_slots) return;  // and what comes over the rail
  if (topology.num_domains() > 1) {
    check_values(handle.rail_tokens, topology.num_domains(), 0, output.max_tokens, "number of tokens");
    for (int domain = 0; domain < topology.num_domains(); domain++) {
      const int64_t first = static_cast<int64_t>(domain) * output.max_tokens * output.topk;
      const int64_t count = static_cast<int64_t>(handle.rail_tokens[domain]) * output.topk;
      check_routes(handle.rail, first, count, output, shape);
    }
  }
  for (int64_t slot = 0; slot < received && expert_rows; slot++) {
    check_values(handle.slot(slot), output.topk, kDroppedRow, output.rows() - 1, "place");
  }
}

}  // namespace ep
