#include "torch/stats.h"

#include <pybind11/stl.h>

#include <vector>

namespace py = pybind11;

namespace ep {
namespace {

std::vector<int> ranks_of(const RankMask& mask, int num_ranks) {
  std::vector<int> ranks;
  for (int r = 0; r < num_ranks; r++) {
    if (mask.has(r)) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace

py::dict stats(Group& group) {
  py::dict result;
  const Report report = group.report();
  result["dispatches"] = report.epochs[0];
  result["combines"] = report.epochs[1];
  result["ht_dispatches"] = report.ht_epochs[0];
  result["ht_combines"] = report.ht_epochs[1];
  result["staged_dispatches"] = report.ht_staged[0];
  result["staged_combines"] = report.ht_staged[1];
  result["dropped_rows"] = report.dropped_rows;
  result["invalid_ids"] = report.invalid_ids.count;
  result["masked_ranks"] = ranks_of(report.masked, group.num_ranks());
  result["left_out_ranks"] = ranks_of(report.left_out, group.num_ranks());
  const Calls& calls = group.calls();
  result["calls"] = py::dict(py::arg("dispatch") = calls.dispatch, py::arg("combine") = calls.combine,
                             py::arg("combine_weights") = calls.combine_weights, py::arg("split") = calls.split,
                             py::arg("ht_dispatch") = calls.ht[0], py::arg("ht_combine") = calls.ht[1]);
  result["window_bytes"] = group.window().bytes;
  const Topology& topology = group.topology();
  const bool is_mesh = group.window().rail[0].link_size < topology.domain_size;
  result["ll_network"] = topology.num_domains() == 1 ? "" : is_mesh ? "mesh" : "rail";
  if (!group.is_destroyed()) result["backend"] = group.backend()->name();
  const auto arena = group.arena();
  result["arena_bytes"] = arena ? arena->bytes() : 0;
  result["arena_free_bytes"] = arena ? arena->free_bytes() : 0;
  return result;
}

py::dict wire_bytes(Group& group) {
  py::dict result;
  if (group.is_destroyed()) return result;
  const WireBytes bytes = group.backend()->wire_bytes();
  result["rows_count"] = bytes.rows;
  result["rows"] = bytes.row_bytes;
  result["other"] = bytes.other_bytes;
  if (!bytes.network_bytes.empty()) {
    result["network_puts"] = bytes.network_puts;
    result["network"] = bytes.network_bytes;
  }
  return result;
}

}  // namespace ep
