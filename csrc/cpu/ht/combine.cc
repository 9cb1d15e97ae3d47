// High-throughput combine on the host: every rank makes its rows readable, the home ranks of its domain read them. For
// tokens of another domain a rank adds up its domain's rows and sends one home.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/testing.h"
#include "cpu/common/rows.h"
#include "cpu/common/sums.h"
#include "cpu/ht/operations.h"

namespace ep {
namespace {

// Words of combine's op message: where its rows may be read in place, low word first; kNoOffset: staged.
constexpr int kRowsOffset = HtMessage::kOffsets;
constexpr int kMessageWords = kRowsOffset + 2;

class Combine {
 public:
  Combine(const HtCombineParams& p, HtExchange& exchange)
      : p_(p), exchange_(exchange), format_(p.offsets.row), home_(p), sum_(p.hidden), term_(p.hidden) {}

  void run() {
    send_messages();
    if (p_.options.weighting == Weighting::kHome && p_.has_rows()) send_weights();
    stage();
    exchange_.signal_domain(HtSignal::kCombineReady);
    testing::delay(testing::Point::kBeforeReceive, exchange_.rank());
    exchange_.await_domain(HtSignal::kCombineReady, Awaited::kReady);
    if (testing::has_bug(testing::Bug::kEarlyDone)) exchange_.signal_domain(HtSignal::kCombineDone);
    if (exchange_.num_domains() > 1) {
      send_sums();
      exchange_.signal_rail(HtSignal::kCombineRail);
      exchange_.await_rail(HtSignal::kCombineRail, Awaited::kRail);
    }
    for (int token = 0; token < p_.num_tokens; token++) {
      testing::delay(testing::Point::kBetweenRows, exchange_.rank());
      add_up(token);
    }
    if (!testing::has_bug(testing::Bug::kEarlyDone)) exchange_.signal_domain(HtSignal::kCombineDone);
    exchange_.await_domain(HtSignal::kCombineDone, Awaited::kDone);  // the input belongs to the caller again
    exchange_.complete();
  }

 private:
  // ---- Op messages

  void send_messages() {
    std::vector<uint32_t> words(kMessageWords - OpHeader::kWords, 0);
    const Offset offset = p_.reads_in_place() ? p_.rows_offset : kNoOffset;
    words[kRowsOffset - OpHeader::kWords] = static_cast<uint32_t>(offset);
    words[kRowsOffset + 1 - OpHeader::kWords] = static_cast<uint32_t>(offset >> 32);
    exchange_.send_messages(words);
    exchange_.await_headers(static_cast<int>(words.size()));
    for (int rank = 0; rank < exchange_.num_ranks(); rank++) {
      offsets_.push_back(exchange_.message_word(rank, kRowsOffset) |
                         static_cast<uint64_t>(exchange_.message_word(rank, kRowsOffset + 1)) << 32);
    }
  }

  // ---- Weights of the home rank

  bool is_skipped(int64_t index) const {
    if (p_.home_topk_idx == nullptr) return false;
    const int64_t id = p_.is_idx64 ? static_cast<const int64_t*>(p_.home_topk_idx)[index]
                                   : static_cast<const int32_t*>(p_.home_topk_idx)[index];
    return !p_.shape.valid(id);
  }

  // Weights and skip marks of one token's choices, to their slots in the own domain.
  void deliver_weights(const int32_t* ids, const int32_t* slots, const float* weights, const int32_t* marks) {
    const HtSlotFormat& format = p_.offsets.slot;
    for (int k = 0; k < p_.shape.topk; k++) {
      if (ids[k] < 0 || slots[k] < 0 || !exchange_.topology().is_lsa(exchange_.rank(), p_.shape.owner(ids[k])))
        continue;
      const int owner = p_.shape.owner(ids[k]);
      char* slot = exchange_.at(owner, p_.offsets.slot_words(slots[k]));
      std::memcpy(slot + format.place(k) * 4, marks + k, 4);
      std::memcpy(slot + format.weight(k) * 4, weights + k, 4);
      exchange_.note_other(owner, 8);
    }
  }

  void send_weights() {
    const int topk = p_.shape.topk;
    const HtRouteFormat& format = p_.offsets.route;
    for (int token = 0; token < p_.num_tokens; token++) {
      const int64_t first = static_cast<int64_t>(token) * topk;
      std::vector<int32_t> marks(topk);
      for (int k = 0; k < topk; k++) marks[k] = is_skipped(first + k) ? kNoRow : 0;
      const float* weights = p_.home_weights + first;
      deliver_weights(p_.handle.own.ids + first, p_.handle.own.slots + first, weights, marks.data());
      for (int other = 0; other < exchange_.num_domains(); other++) {
        if (other == exchange_.domain()) continue;
        char* words = exchange_.local(p_.offsets.route_out(other, token));
        std::memcpy(words + format.expert(0) * 4, marks.data(), topk * 4);
        std::memcpy(words + format.weight(0) * 4, weights, topk * 4);
      }
    }
    if (exchange_.num_domains() > 1) forward_weights();
    exchange_.signal_domain(HtSignal::kCombineWeights);
    exchange_.await_domain(HtSignal::kCombineWeights, Awaited::kWeights);
  }

  void forward_weights() {
    const int topk = p_.shape.topk;
    const HtRouteFormat& format = p_.offsets.route;
    for (int other = 0; other < exchange_.num_domains(); other++) {
      if (other == exchange_.domain() || p_.num_tokens == 0) continue;
      const int peer = p_.offsets.rail_peer(exchange_.rank(), other);
      const uint64_t bytes = static_cast<uint64_t>(p_.num_tokens) * format.stride();
      exchange_.put(peer, p_.offsets.route_in(exchange_.domain(), 0), p_.offsets.route_out(other, 0), bytes);
      exchange_.note_other(peer, bytes);
    }
    exchange_.signal_rail(HtSignal::kCombineRailWeights);
    exchange_.await_rail(HtSignal::kCombineRailWeights, Awaited::kWeights);
    for (int source = 0; source < exchange_.num_domains(); source++) {
      if (source == exchange_.domain()) continue;
      for (int token = 0; token < p_.handle.rail_tokens[source]; token++) {
        const size_t first = p_.offsets.rail_index(source, token) * topk;
        const char* words = exchange_.local(p_.offsets.route_in(source, token));
        deliver_weights(p_.handle.rail.ids + first, p_.handle.rail.slots + first,
                        reinterpret_cast<const float*>(words + format.weight(0) * 4),
                        reinterpret_cast<const int32_t*>(words + format.expert(0) * 4));
      }
    }
  }

  // ---- Rows that other ranks read here

  char* staged(int64_t slot, int part) { return exchange_.local(p_.offsets.staged_row(slot) + format_.offset[part]); }

  void stage() {
    const bool is_copied = p_.has_rows() && !p_.reads_in_place();
    if (!is_copied && !p_.has_values) return;
    const bool expert_rows = has_expert_rows(p_.output.layout);
    int64_t slot = 0, start = 0;
    for (int source = 0; source < p_.shape.num_ranks; source++) {
      const int64_t count = p_.handle.counts[source * p_.shape.num_ranks + exchange_.rank()];
      for (int64_t index = 0; index < count; index++, slot++) {
        const int32_t row = expert_rows ? kNoRow : p_.output.row(source, start, index);
        testing::delay(testing::Point::kBetweenRows, exchange_.rank());
        if (is_copied) expert_rows ? stage_partial(slot) : stage_row(slot, row);
        if (p_.has_values) stage_scalars(slot, row);
      }
      start += count;
    }
  }

  void stage_row(int64_t slot, int32_t row) {
    if (row < 0) return;  // dropped, as the home rank knows
    load(row);
    from_floats(p_.options.wire_dtype, term_.data(), staged(slot, 0), p_.hidden);
  }

  void load(int32_t row) { to_floats(p_.dtype, row_at(p_.rows, row, p_.hidden, p_.dtype), term_.data(), p_.hidden); }

  // This rank's rows of a token, weighted and added up in the order of k.
  void stage_partial(int64_t slot) {
    sum_.begin();
    const char* given = exchange_.local(p_.offsets.slot_words(slot));
    for (int k = 0; k < p_.shape.topk; k++) {
      const int32_t* kept = p_.handle.slot(slot);
      const int32_t row = kept[p_.offsets.slot.place(k)];
      if (row < 0) continue;
      float weight;
      std::memcpy(&weight, kept + p_.offsets.slot.weight(k), 4);
      if (p_.options.weighting == Weighting::kHome) {
        int32_t mark;
        std::memcpy(&mark, given + p_.offsets.slot.place(k) * 4, 4);
        if (mark == kNoRow) continue;
        std::memcpy(&weight, given + p_.offsets.slot.weight(k) * 4, 4);
      }
      if (p_.signals.counters != nullptr) exchange_.await_row(p_.signals, row);
      load(row);
      if (p_.options.weighting != Weighting::kNone) {
        for (float& value : term_) value = weight * value;
      }
      sum_.add(term_);
    }
    from_floats(p_.options.wire_dtype, sum_.values.data(), staged(slot, 0), p_.hidden);
  }

  void stage_scalars(int64_t slot, int32_t row) {
    const int topk = p_.shape.topk;
    const bool expert_rows = has_expert_rows(p_.output.layout);
    for (int k = 0; k < topk; k++) {
      const int32_t place = expert_rows ? p_.handle.slot(slot)[p_.offsets.slot.place(k)] : row;
      const float value = place < 0 ? 0.0f : p_.values[expert_rows ? place : static_cast<int64_t>(place) * topk + k];
      std::memcpy(staged(slot, format_.num_parts - 1) + k * 4, &value, 4);
    }
  }

  // ---- Reading

  struct Token {
    const int32_t *ids, *rows, *slots;  // [K]
  };
  Token token_of(const HtRoutes& all, size_t first) const {
    return {all.ids + first, all.rows + first, all.slots + first};
  }

  // Adds the rows of the ranks of the own domain, in rank order; false if none has an expert of the token.
  bool add_domain(const Token& token, Sum& sum, float* scalars) {
    bool is_here = false;
    for (int lsa = 0; lsa < exchange_.topology().domain_size; lsa++) {
      const int rank = exchange_.domain() * exchange_.topology().domain_size + lsa;
      int32_t slot = kNoRow, row = kNoRow;
      for (int k = p_.shape.topk - 1; k >= 0; k--) {
        if (token.ids[k] < 0 || p_.shape.owner(token.ids[k]) != rank) continue;
        slot = token.slots[k];
        if (token.rows[k] >= 0) row = token.rows[k];
      }
      if (slot == kNoRow) continue;
      is_here = true;
      if (p_.has_rows()) {
        read_row(rank, row, slot);
        sum.add(term_);
      }
      for (int k = 0; k < p_.shape.topk && p_.has_values; k++) {
        if (token.ids[k] < 0 || p_.shape.owner(token.ids[k]) != rank) continue;
        const int part = format_.num_parts - 1;
        std::memcpy(scalars + k, exchange_.at(rank, p_.offsets.staged_row(slot) + format_.offset[part]) + k * 4, 4);
        exchange_.note_other(rank, 4);
      }
    }
    return is_here;
  }

  // A partial into term_, rounded to the wire dtype. A rank that has dropped all rows of the token counts with +0.
  void read_row(int rank, int32_t row, int32_t slot) {
    if (row < 0) {
      std::fill(term_.begin(), term_.end(), 0.0f);
      return;
    }
    const bool is_in_place = offsets_[rank] != kNoOffset;
    const DType dtype = is_in_place ? p_.dtype : p_.options.wire_dtype;
    const auto bytes = static_cast<uint64_t>(wire_row_bytes(dtype, p_.hidden));
    if (is_in_place) exchange_.check_row(rank, row, (exchange_.window_bytes() - offsets_[rank]) / bytes);
    const Offset offset = is_in_place ? offsets_[rank] + row * bytes : p_.offsets.staged_row(slot) + format_.offset[0];
    to_floats(dtype, exchange_.at(rank, offset), term_.data(), p_.hidden);
    exchange_.note_row(rank, bytes);
    if (dtype != p_.options.wire_dtype) round(term_);
  }

  void round(Floats& row) {
    wire_.resize(row.size());
    from_floats(p_.options.wire_dtype, row.data(), wire_.data(), p_.hidden);
    to_floats(p_.options.wire_dtype, wire_.data(), row.data(), p_.hidden);
  }

  // One row home for each token of the rail peers with an expert in this domain.
  void send_sums() {
    const int topk = p_.shape.topk;
    for (int home = 0; home < exchange_.num_domains(); home++) {
      if (home == exchange_.domain()) continue;
      const int peer = p_.offsets.rail_peer(exchange_.rank(), home);
      for (int token = 0; token < p_.handle.rail_tokens[home]; token++) {
        std::vector<float> scalars(topk, 0.0f);
        const Token route = token_of(p_.handle.rail, p_.offsets.rail_index(home, token) * topk);
        sum_.begin();
        if (!add_domain(route, sum_, scalars.data())) continue;
        const Offset out = p_.offsets.rail_row_out(home, token);
        if (p_.has_rows()) from_floats(p_.options.wire_dtype, sum_.values.data(), exchange_.local(out), p_.hidden);
        if (p_.has_values) {
          std::memcpy(exchange_.local(out) + format_.offset[format_.num_parts - 1], scalars.data(), topk * 4);
        }
        exchange_.put(peer, p_.offsets.rail_row_in(exchange_.domain(), token), out, format_.body_bytes);
        if (p_.has_rows()) {
          exchange_.note_row(peer, format_.body_bytes);
        } else {
          exchange_.note_other(peer, format_.body_bytes);
        }
      }
    }
  }

  // One own token: the biases, then the domains in order.
  void add_up(int token) {
    const int topk = p_.shape.topk;
    const size_t first = static_cast<size_t>(token) * topk;
    const Token route = token_of(p_.handle.own, first);
    std::vector<float> scalars(topk, 0.0f);
    home_.begin(token);
    for (int domain = 0; domain < exchange_.num_domains(); domain++) {
      if (exchange_.num_domains() == 1) {
        add_domain(route, home_.terms, scalars.data());
      } else if (domain != exchange_.domain()) {
        add_from_rail(route, domain, token, scalars.data());
      } else {
        sum_.begin();
        add_domain(route, sum_, scalars.data());
        if (!sum_.has_term()) continue;
        round(sum_.values);  // as if it had travelled
        home_.terms.add(sum_.values);
      }
    }
    if (p_.has_rows()) home_.store(token);
    if (p_.has_values) std::copy(scalars.begin(), scalars.end(), p_.out_values + first);
  }

  void add_from_rail(const Token& route, int domain, int token, float* scalars) {
    const char* row = exchange_.local(p_.offsets.rail_row_in(domain, token));
    bool is_there = false;
    for (int k = 0; k < p_.shape.topk; k++) {
      if (route.ids[k] < 0 || exchange_.topology().domain_of(p_.shape.owner(route.ids[k])) != domain) continue;
      is_there = true;
      if (p_.has_values) std::memcpy(scalars + k, row + format_.offset[format_.num_parts - 1] + k * 4, 4);
    }
    if (!is_there || !p_.has_rows()) return;
    to_floats(p_.options.wire_dtype, row, term_.data(), p_.hidden);
    home_.terms.add(term_);
  }

  const HtCombineParams& p_;
  HtExchange& exchange_;
  const HtRowFormat& format_;
  std::vector<Offset> offsets_;  // [R] of rows that are read in place
  HomeSum<HtCombineParams> home_;
  Sum sum_;  // of this rank's rows, or of this domain's
  Floats term_, wire_;
};

}  // namespace

void cpu_ht_combine(const HtCombineParams& p, Transport& transport, CpuState& state) {
  HtExchange exchange(transport, state, Kind::kCombine, p.offsets, p.header, p.given_dispatch());
  Combine(p, exchange).run();
  if (p.has_rows() && !has_expert_rows(p.output.layout) && !p.reads_in_place()) state.ht_staged[1]++;
}

}  // namespace ep
