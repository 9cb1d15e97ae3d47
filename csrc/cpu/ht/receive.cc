// The receive part of a high-throughput dispatch: rows lie in place or in the staging rows, their metadata in the
// slots.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/common/arrivals.h"
#include "cpu/common/ids.h"
#include "cpu/ht/operations.h"
#include "layout/ht/routing.h"

namespace ep {
namespace {

class Received {
 public:
  Received(const HtDispatchParams& p, HtExchange& exchange)
      : p_(p),
        exchange_(exchange),
        is_filled_(p.options.zero_padding ? p.output.rows() : 0, 0),
        arrivals_(p.arrivals, p.output, p.handle.expert_counts) {}

  void place() {
    if (sends_metadata(p_.variant)) {
      clear_row_info(p_.output, p_.is_idx64, p_.out_topk_idx, p_.out_weights, p_.row_expert);
    }
    int64_t slot = 0, start = 0;
    for (int source = 0; source < p_.shape.num_ranks; source++) {
      const int64_t count = p_.handle.counts[source * p_.shape.num_ranks + exchange_.rank()];
      for (int64_t index = 0; index < count; index++, slot++) place_slot(slot, p_.output.row(source, start, index));
      start += count;
    }
    for (size_t row = 0; row < is_filled_.size(); row++) {
      if (is_filled_[row]) continue;
      for (int i = 0; i < p_.num_parts; i++) std::memset(out_row(i, static_cast<int64_t>(row)), 0, p_.parts[i].bytes);
    }
  }

 private:
  char* out_row(int part, int64_t row) const {
    return static_cast<char*>(p_.parts[part].out) + row * p_.parts[part].bytes;
  }

  void place_slot(int64_t slot, int32_t row_of_rank_layouts) {
    const int topk = p_.shape.topk;
    const bool expert_rows = has_expert_rows(p_.output.layout);
    int32_t places[kMaxTopk];
    float weights[kMaxTopk];
    if (sends_metadata(p_.variant)) {
      const auto* words = reinterpret_cast<const int32_t*>(exchange_.local(p_.offsets.slot_words(slot)));
      const HtSlotFormat& format = p_.offsets.slot;
      std::memcpy(places, words + format.place(0), topk * 4);
      std::memcpy(weights, words + format.weight(0), topk * 4);
      std::copy_n(words + (expert_rows ? 0 : format.token()), expert_rows ? format.words() : 1, p_.handle.slot(slot));
    } else if (expert_rows) {
      std::copy_n(p_.handle.slot(slot) + p_.offsets.slot.place(0), topk, places);
    }
    if (expert_rows) {
      place_copies(slot, places, weights);
    } else if (row_of_rank_layouts >= 0) {
      put_row(slot, kNoRow, row_of_rank_layouts);
      for (int k = 0; k < topk && sends_metadata(p_.variant); k++) {
        const int64_t index = static_cast<int64_t>(row_of_rank_layouts) * topk + k;
        set_id(p_.out_topk_idx, p_.is_idx64, index, places[k]);
        p_.out_weights[index] = weights[k];
      }
    }
  }

  // The sender has written the row of the first choice that fits.
  void place_copies(int64_t slot, const int32_t* places, const float* weights) {
    int32_t first = kNoRow;
    for (int k = 0; k < p_.shape.topk; k++) {
      const int32_t row = places[k];
      if (row < 0) continue;
      put_row(slot, first, row);
      if (first == kNoRow) first = row;
      if (sends_metadata(p_.variant)) {
        p_.out_weights[row] = weights[k];
        if (p_.row_expert != nullptr) p_.row_expert[row] = expert_of(row);
      }
      arrivals_.place(row);
    }
  }

  int32_t expert_of(int32_t row) {
    if (experts_.empty()) {  // starts of the experts, in packed rows
      int64_t start = 0;
      for (int e = 0; e < p_.output.local_experts; e++) {
        start += p_.output.span(p_.handle.expert_counts[e]);
        experts_.push_back(start);
      }
    }
    return static_cast<int32_t>(std::upper_bound(experts_.begin(), experts_.end(), row) - experts_.begin());
  }

  // To `row`, from row `first` where the sender has written that one in place, else from the staging rows.
  void put_row(int64_t slot, int32_t first, int32_t row) {
    for (int i = 0; i < p_.num_parts; i++) {
      const bool is_in_place = p_.parts[i].out_offset != kNoOffset;
      if (is_in_place && first < 0) continue;
      const char* from =
          is_in_place ? out_row(i, first) : exchange_.local(p_.offsets.staged_row(slot) + p_.offsets.row.offset[i]);
      std::memcpy(out_row(i, row), from, p_.parts[i].bytes);
    }
    if (p_.options.zero_padding) is_filled_[row] = 1;
  }

  const HtDispatchParams& p_;
  HtExchange& exchange_;
  std::vector<char> is_filled_;
  CpuArrivals arrivals_;
  std::vector<int64_t> experts_;
};

}  // namespace

void place_received(const HtDispatchParams& p, HtExchange& exchange) { Received(p, exchange).place(); }

}  // namespace ep
