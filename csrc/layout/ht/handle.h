// A handle of high throughput: two int32 tensors. `route` has static size and belongs to the rank's own tokens; `slots`
// has an entry for each row that was received.
#pragma once

#include <cstdint>

#include "layout/common/outputs.h"
#include "layout/common/topology.h"

namespace ep {

// What travels beside a row to its slot at the receiver, and what a handle keeps of it, 32-bit words: for each choice
// its place (expert layouts: output row, kNoRow or kDroppedRow; rank layouts: local expert or -1), then its weight,
// then the token at the source.
struct HtSlotFormat {
  int topk = 1;

  EP_HD int place(int k) const { return k; }
  EP_HD int weight(int k) const { return topk + k; }
  EP_HD int token() const { return 2 * topk; }
  EP_HD int words() const { return 2 * topk + 1; }
  EP_HD int stride() const { return words() * 4; }
};

// route: rows from each source to each destination [R, R] | demand of each local expert [L], the alignment of packed
// experts [1], and the tag of the dispatch that made the handle [1], the same on all ranks | of each own token and
// choice the expert id, the output row at its owner (kNoRow, kDroppedRow) and the slot there [T, K] each | several
// domains: tokens of the rail peer of each [D], and their ids, rows and slots in this domain [D, M, K] each; then, on
// GPUs, the place of each own token among those that go to each domain [T, D]. There the tokens of a rail peer are
// those with an expert in this domain, by their places.
// slots [S, words]: expert layouts: as HtSlotFormat says; rank layouts: the token at the source.
struct HtHandleShape {
  int num_ranks = 1;
  int num_domains = 1;
  int local_experts = 1;
  int num_tokens = 0;
  int max_tokens = 1;
  int topk = 1;
  bool has_expert_rows = false;
  int64_t num_slots = 0;

  static HtHandleShape make(const OutputShape& output, const Topology& topology, int num_tokens, int64_t num_slots) {
    return {output.num_ranks,
            topology.num_domains(),
            output.local_experts,
            num_tokens,
            output.max_tokens,
            output.topk,
            ep::has_expert_rows(output.layout),
            num_slots};
  }

  EP_HD int64_t counts_size() const { return static_cast<int64_t>(num_ranks) * num_ranks; }
  EP_HD int64_t own_size() const { return static_cast<int64_t>(num_tokens) * topk; }
  EP_HD int64_t rail_size() const {
    return num_domains == 1 ? 0 : static_cast<int64_t>(num_domains) * max_tokens * topk;
  }
  EP_HD int64_t experts_at() const { return align_up<int64_t>(counts_size(), 4); }
  EP_HD int64_t ids_at() const { return experts_at() + align_up(local_experts + 2, 4); }
  EP_HD int64_t rows_at() const { return ids_at() + align_up<int64_t>(own_size(), 4); }
  EP_HD int64_t slots_at() const { return rows_at() + align_up<int64_t>(own_size(), 4); }
  EP_HD int64_t rail_tokens_at() const { return slots_at() + align_up<int64_t>(own_size(), 4); }
  EP_HD int64_t rail_ids_at() const { return rail_tokens_at() + (num_domains == 1 ? 0 : align_up(num_domains, 4)); }
  EP_HD int64_t rail_rows_at() const { return rail_ids_at() + align_up<int64_t>(rail_size(), 4); }
  EP_HD int64_t rail_slots_at() const { return rail_rows_at() + align_up<int64_t>(rail_size(), 4); }
  EP_HD int64_t places_size() const { return num_domains == 1 ? 0 : static_cast<int64_t>(num_tokens) * num_domains; }
  EP_HD int64_t places_at() const { return rail_slots_at() + align_up<int64_t>(rail_size(), 4); }
  EP_HD int64_t route_size() const { return places_at() + align_up<int64_t>(places_size(), 4); }

  // For a number of tokens that may not be known yet.
  template <class Int>
  Int route_size_for(Int tokens) const {
    HtHandleShape none = *this;
    none.num_tokens = 0;
    const Int own = (tokens * topk + 3) / 4 * 12 + none.route_size();
    return num_domains == 1 ? own : own + (tokens * num_domains + 3) / 4 * 4;
  }

  EP_HD int slot_words() const { return has_expert_rows ? HtSlotFormat{topk}.stride() / 4 : 1; }
};

// Tokens, each with the experts, rows and slots of its choices: the own ones, or those that come over the rail.
struct HtRoutes {
  int32_t* ids = nullptr;  // [.., K]
  int32_t* rows = nullptr;
  int32_t* slots = nullptr;
};

struct HtHandlePtrs {
  int32_t* counts = nullptr;         // [R, R]
  int32_t* expert_counts = nullptr;  // [L]
  int32_t* alignment = nullptr;      // [1]
  int32_t* dispatch = nullptr;       // [1]
  HtRoutes own;                      // [T, K]
  int32_t* rail_tokens = nullptr;    // [D]
  HtRoutes rail;                     // [D, M, K]
  int32_t* places = nullptr;         // [T, D]
  int32_t* slots = nullptr;          // [S, slot_words]
  int64_t num_slots = 0;
  int slot_words = 1;

  EP_HD int32_t* slot(int64_t index) const { return slots + index * slot_words; }

  static HtHandlePtrs of(int32_t* route, int32_t* slots, const HtHandleShape& shape) {
    HtHandlePtrs handle;
    handle.counts = route;
    handle.expert_counts = route + shape.experts_at();
    handle.alignment = handle.expert_counts + shape.local_experts;
    handle.dispatch = handle.alignment + 1;
    handle.own = {route + shape.ids_at(), route + shape.rows_at(), route + shape.slots_at()};
    if (shape.num_domains > 1) {
      handle.rail_tokens = route + shape.rail_tokens_at();
      handle.rail = {route + shape.rail_ids_at(), route + shape.rail_rows_at(), route + shape.rail_slots_at()};
      handle.places = route + shape.places_at();
    }
    handle.slots = slots;
    handle.num_slots = shape.num_slots;
    handle.slot_words = shape.slot_words();
    return handle;
  }
};

}  // namespace ep
