// Low-latency combine on the host. Each rank adds up its own experts' rows of a token in the order of k and sends one
// row home; the home rank adds the ranks' rows in rank order. docs/semantics.md fixes every rounding.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/testing.h"
#include "cpu/common/rows.h"
#include "cpu/common/sums.h"
#include "cpu/ll/exchange.h"
#include "cpu/ll/operations.h"

namespace ep {
namespace {

// Weights that the home ranks send for this combine.
class HomeWeights {
 public:
  HomeWeights(const LlCombineParams& p, Exchange& exchange) : p_(p), exchange_(exchange) {}

  // To the experts' ranks; if the rows travel unweighted, also to the own window, for the receive.
  void send() {
    for (int token = 0; token < p_.num_tokens; token++) {
      for (int k = 0; k < p_.shape.topk; k++) {
        const int index = token * p_.shape.topk + k;
        const int32_t id = p_.handle.ids[index];
        if (id < 0) continue;
        const uint32_t word = weight_word(index);
        exchange_.send_words(p_.shape.owner(id), place(exchange_.rank(), token, k), &word, 1);
        if (p_.sends_unweighted) exchange_.keep_word(place(exchange_.rank(), token, k), word);
      }
    }
    exchange_.close_stage();
  }

  // False: the choice is skipped, or the source is masked.
  bool await(int source, int token, int k, float& weight) {
    uint32_t word;
    const bool is_there = exchange_.await_words(source, place(source, token, k), Awaited::kWeights, &word, 1);
    std::memcpy(&weight, &word, sizeof word);
    return is_there && word != kSkippedWeight;
  }

 private:
  Offset place(int source, int token, int k) const { return p_.offsets.weight(exchange_.bank(), source, token, k); }

  uint32_t weight_word(int index) const {
    if (p_.home_topk_idx != nullptr) {
      const int64_t id = p_.is_idx64 ? static_cast<const int64_t*>(p_.home_topk_idx)[index]
                                     : static_cast<const int32_t*>(p_.home_topk_idx)[index];
      if (!p_.shape.valid(id)) return kSkippedWeight;
    }
    uint32_t bits;
    std::memcpy(&bits, p_.home_weights + index, sizeof bits);
    return escape_float(bits);
  }

  const LlCombineParams& p_;
  Exchange& exchange_;
};

// What a rank's rows of a token add up to, in the order of k.
class PartialSum {
 public:
  explicit PartialSum(const LlCombineParams& p) : p_(p), sum_(p.hidden), row_(p.hidden) {}

  void begin() { sum_.begin(); }
  void add_row(const void* numbers, float weight) {
    to_floats(p_.dtype, numbers, row_.data(), p_.hidden);
    if (p_.options.weighting != Weighting::kNone) {
      for (float& value : row_) value = weight * value;
    }
    sum_.add(row_);
  }
  // In the wire dtype.
  void round(uint32_t* words) const { from_floats(p_.options.wire_dtype, sum_.values.data(), words, p_.hidden); }

 private:
  const LlCombineParams& p_;
  Sum sum_;
  Floats row_;
};

// Adds up this rank's rows of token `token` of `home`: false if it has no expert of it.
bool add_up(const LlCombineParams& p, HomeWeights& home_weights, int home, int token, PartialSum& sum) {
  const int map_k = p.output.map_k();
  const size_t entry = p.offsets.slot(home, token) * map_k;
  bool is_here = false;
  sum.begin();
  for (int k = 0; k < map_k; k++) {
    const int32_t source_row = p.handle.rows[entry + k];
    if (source_row == kNoRow) continue;
    is_here = true;
    float weight = 1.0f;
    if (p.options.weighting == Weighting::kHome && !home_weights.await(home, token, k, weight)) continue;
    if (source_row == kDroppedRow) continue;
    if (p.options.weighting == Weighting::kDispatch) weight = p.handle.weights[entry + k];
    sum.add_row(row_at(p.rows, source_row, p.hidden, p.dtype), weight);
  }
  return is_here;
}

// Sends this rank's rows of a token as they are, and the word that says of which choices there are rows.
void send_unweighted(const LlCombineParams& p, Exchange& exchange, int home, int token, std::vector<uint32_t>& words) {
  const size_t entry = p.offsets.slot(home, token) * p.output.map_k();
  bool is_here = false;
  uint32_t sent = 0;
  for (int k = 0; k < p.output.map_k(); k++) {
    const int32_t source_row = p.handle.rows[entry + k];
    is_here = is_here || source_row != kNoRow;
    if (source_row < 0) continue;
    if (p.signals.counters != nullptr) exchange.await_signal(p.signals, source_row);
    std::memcpy(words.data(), row_at(p.rows, source_row, p.hidden, p.dtype), p.row.payload_bytes);
    encode_row(p.row, words.data());
    const Offset slot = p.offsets.unweighted_row(exchange.bank(), exchange.rank(), token, k, sent == 0);
    exchange.send_row_to(home, slot, words.data(), static_cast<int>(words.size()));
    sent |= 1u << k;
  }
  if (is_here) exchange.send_words(home, p.offsets.id_words(exchange.bank(), exchange.rank(), token), &sent, 1);
}

void send(const LlCombineParams& p, Exchange& exchange) {
  for (int step = 0; step < exchange.num_ranks(); step++) exchange.send_header(exchange.peer(step));
  HomeWeights home_weights(p, exchange);
  if (p.options.weighting == Weighting::kHome) home_weights.send();
  if (p.options.weighting == Weighting::kHome && !p.sends_unweighted) {
    exchange.await_arrivals();
    exchange.await_headers();
  }
  PartialSum sum(p);
  std::vector<uint32_t> words(p.row.wire_bytes() / 4);
  for (int step = 0; step < exchange.num_ranks(); step++) {
    const int home = exchange.peer(step);
    if (exchange.is_masked(home)) continue;
    for (int token = 0; token < p.handle.tokens[home]; token++) {
      if (p.sends_unweighted) {
        send_unweighted(p, exchange, home, token, words);
      } else if (add_up(p, home_weights, home, token, sum)) {
        sum.round(words.data());
        encode_row(p.row, words.data());
        exchange.send_row(home, token, words.data(), static_cast<int>(words.size()));
      }
    }
  }
  exchange.close_stage();
}

// The partial sum of an own token that a rank would have sent, from the rows that it has sent instead. `row`: room for
// one of them. False: the rank is masked.
bool take_unweighted(const LlCombineParams& p, Exchange& exchange, int source, int token, PartialSum& sum,
                     std::vector<uint32_t>& row, std::vector<uint32_t>& rounded) {
  HomeWeights home_weights(p, exchange);
  uint32_t sent = 0;
  const Offset word = p.offsets.id_words(exchange.bank(), source, token);
  if (!exchange.await_words(source, word, Awaited::kPartials, &sent, 1)) return false;
  sum.begin();
  const uint32_t first = sent & (0 - sent);
  for (int k = 0; k < p.shape.topk; k++) {
    if ((sent >> k & 1) == 0) continue;
    const Offset slot = p.offsets.unweighted_row(exchange.bank(), source, token, k, 1u << k == first);
    const auto words = static_cast<int>(row.size());
    if (!exchange.take_row_from(source, slot, token, Awaited::kPartials, row.data(), words)) return false;
    float weight;
    if (home_weights.await(exchange.rank(), token, k, weight)) sum.add_row(row.data(), weight);
  }
  sum.round(rounded.data());
  return true;
}

// The ranks' sums to the sum at home, in rank order; over several domains, each domain's sum is rounded as if it had
// travelled.
class RankSums {
 public:
  RankSums(const LlCombineParams& p, Sum& home)
      : p_(p), topology_{p.shape.num_ranks, p.domain_size}, home_(home), domain_(p.hidden), row_(p.hidden) {}

  void add_rank(const uint32_t* words) {
    to_floats(p_.options.wire_dtype, words, row_.data(), p_.hidden);
    (topology_.num_domains() == 1 ? home_ : domain_).add(row_);
  }
  void end_rank(int rank) {
    if (!domain_.has_term() || topology_.lsa_rank(rank) != topology_.domain_size - 1) return;
    std::vector<float> rounded(p_.hidden);
    from_floats(p_.options.wire_dtype, domain_.values.data(), rounded.data(), p_.hidden);
    to_floats(p_.options.wire_dtype, rounded.data(), row_.data(), p_.hidden);
    home_.add(row_);
    domain_.begin();
  }

 private:
  const LlCombineParams& p_;
  const Topology topology_;
  Sum& home_;
  Sum domain_;
  Floats row_;
};

void receive(const LlCombineParams& p, Exchange& exchange) {
  testing::delay(testing::Point::kBeforeReceive, exchange.rank());
  exchange.begin_receiving();
  exchange.await_arrivals();
  exchange.await_headers();
  HomeSum home(p);
  RankSums sums(p, home.terms);
  PartialSum partial(p);
  std::vector<uint32_t> words(p.row.wire_bytes() / 4);
  std::vector<uint32_t> rounded(ceil_div(wire_row_bytes(p.options.wire_dtype, p.hidden), 4));
  for (int token = 0; token < p.num_tokens; token++) {
    const int32_t* ids = p.handle.ids + token * p.shape.topk;
    home.begin(token);
    for (int rank = 0; rank < exchange.num_ranks(); rank++) {
      const bool has_expert =
          std::any_of(ids, ids + p.shape.topk, [&](int32_t id) { return id >= 0 && p.shape.owner(id) == rank; });
      if (has_expert && p.sends_unweighted) {
        if (take_unweighted(p, exchange, rank, token, partial, words, rounded)) sums.add_rank(rounded.data());
      } else if (has_expert &&
                 exchange.take_row(rank, token, Awaited::kPartials, words.data(), static_cast<int>(words.size()))) {
        sums.add_rank(words.data());
      }
      sums.end_rank(rank);
    }
    home.store(token);
  }
  exchange.complete();
}

}  // namespace

void cpu_combine(const LlCombineParams& p, Transport& transport, CpuState& state) {
  Exchange exchange(transport, state, Kind::kCombine, p.offsets, p.header, p.handle.dispatch);
  const int weight_stages = p.options.weighting == Weighting::kHome ? 1 : 0;
  exchange.count_waits(p.wait_cost);
  if (sends(p.phase)) send(p, exchange);
  if (!receives(p.phase)) return;
  if (p.phase == Phase::kRecv) exchange.resume_after(1 + weight_stages);
  receive(p, exchange);
}

void cpu_combine_weights(const LlCombineWeightsParams& p, Transport& transport, CpuState& state) {
  Exchange exchange(transport, state, Kind::kCombine, p.offsets, p.header, p.handle.dispatch);
  const int map_k = p.output.map_k(), topk = p.shape.topk;
  const bool expert_rows = has_expert_rows(p.output.layout);
  for (int step = 0; step < exchange.num_ranks(); step++) exchange.send_header(exchange.peer(step));
  for (int home = 0; home < exchange.num_ranks(); home++) {
    for (int token = 0; token < p.handle.tokens[home]; token++) {
      for (int k = 0; k < topk; k++) {
        // A rank layout has one row for all its choices; the home rank picks those that are this rank's.
        const int32_t row = p.handle.rows[p.offsets.slot(home, token) * map_k + (expert_rows ? k : 0)];
        if (row == kNoRow) continue;
        const float value = row < 0 ? 0.0f : p.values[expert_rows ? row : static_cast<int64_t>(row) * topk + k];
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        exchange.send_words(home, p.offsets.weight(exchange.bank(), exchange.rank(), token, k), &bits, 1);
      }
    }
  }
  exchange.close_stage();
  exchange.begin_receiving();
  exchange.await_arrivals();
  exchange.await_headers();
  for (int i = 0; i < p.num_tokens * topk; i++) {
    const int32_t id = p.handle.ids[i];
    uint32_t bits = 0;
    if (id >= 0) {
      const Offset offset = p.offsets.weight(exchange.bank(), p.shape.owner(id), i / topk, i % topk);
      exchange.await_words(p.shape.owner(id), offset, Awaited::kScalars, &bits, 1);
    }
    std::memcpy(p.out + i, &bits, sizeof bits);
  }
  exchange.complete();
}

}  // namespace ep
