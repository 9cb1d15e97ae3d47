#include "layout/ht/routing.h"

namespace ep {

void HtCounts::count(const Shape& shape, int source, const int32_t* ids, int num_tokens) {
  std::vector<int> last(shape.num_ranks, -1);  // token that was counted last for each destination
  for (int i = 0; i < num_tokens * shape.topk; i++) {
    if (ids[i] < 0) continue;
    const int destination = shape.owner(ids[i]), token = i / shape.topk;
    choices[static_cast<size_t>(source) * shape.num_experts + ids[i]]++;
    if (last[destination] == token) continue;
    last[destination] = token;
    rows[static_cast<size_t>(source) * shape.num_ranks + destination]++;
  }
}

Placement place_bins(const Shape& shape, const OutputShape& output, const HtCounts& counts, int destination) {
  Placement placement;
  placement.demand.assign(output.bins(), 0);
  for (int source = 0; source < shape.num_ranks; source++) {
    for (int bin = 0; bin < output.bins(); bin++) {
      if (has_expert_rows(output.layout)) {
        const int expert = destination * shape.local_experts() + bin;
        placement.demand[bin] += counts.choices[static_cast<size_t>(source) * shape.num_experts + expert];
      } else if (bin == source) {
        placement.demand[bin] = counts.rows[static_cast<size_t>(source) * shape.num_ranks + destination];
      }
    }
  }
  finish_bins(output, placement);
  return placement;
}

namespace {

// Where the next row of one source goes at one receiver.
struct Cursor {
  std::vector<int64_t> starts;  // [bins] of the receiver
  std::vector<int64_t> next;    // [bins] index in the bin
  int64_t next_slot = 0;
};

Cursor begin_at(const Shape& shape, const OutputShape& output, const HtCounts& counts, int source, int destination) {
  Cursor cursor;
  cursor.starts = place_bins(shape, output, counts, destination).starts;
  cursor.next.assign(output.bins(), 0);
  for (int before = 0; before < source && has_expert_rows(output.layout); before++) {
    for (int bin = 0; bin < output.bins(); bin++) {
      const int expert = destination * shape.local_experts() + bin;
      cursor.next[bin] += counts.choices[static_cast<size_t>(before) * shape.num_experts + expert];
    }
  }
  cursor.next_slot = first_slot(counts.rows.data(), shape.num_ranks, source, destination);
  return cursor;
}

}  // namespace

void place_tokens(const Shape& shape, const std::vector<OutputShape>& outputs, const HtCounts& counts, int source,
                  int num_tokens, const HtRoutes& routes) {
  std::vector<Cursor> cursors;
  for (int rank = 0; rank < shape.num_ranks; rank++) {
    cursors.push_back(begin_at(shape, outputs[rank], counts, source, rank));
  }
  for (int token = 0; token < num_tokens; token++) {
    const size_t first = static_cast<size_t>(token) * shape.topk;
    for (int k = 0; k < shape.topk; k++) {
      const int32_t id = routes.ids[first + k];
      routes.rows[first + k] = routes.slots[first + k] = kNoRow;
      if (id < 0) continue;
      const int destination = shape.owner(id);
      const OutputShape& output = outputs[destination];
      Cursor& cursor = cursors[destination];
      int earlier = 0;  // a choice of the same rank
      while (earlier < k &&
             (routes.ids[first + earlier] < 0 || shape.owner(routes.ids[first + earlier]) != destination)) {
        earlier++;
      }
      const bool is_first = earlier == k;
      routes.slots[first + k] = is_first ? static_cast<int32_t>(cursor.next_slot++) : routes.slots[first + earlier];
      if (has_expert_rows(output.layout)) {
        const int bin = shape.local_expert(id);
        routes.rows[first + k] = output.row(bin, cursor.starts[bin], cursor.next[bin]++);
      } else if (is_first) {
        routes.rows[first + k] = output.row(source, cursor.starts[source], cursor.next[source]++);
      } else {
        routes.rows[first + k] = routes.rows[first + earlier];
      }
    }
  }
}

}  // namespace ep
