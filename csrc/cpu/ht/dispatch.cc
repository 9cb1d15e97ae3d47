// High-throughput dispatch on the host: ranks exchange counts, each computes the places of its own rows at all
// receivers, and stores them there. Rows for another domain cross once, to a rank that hands them out.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/testing.h"
#include "cpu/common/arrivals.h"
#include "cpu/common/ids.h"
#include "cpu/common/rows.h"
#include "cpu/ht/operations.h"
#include "layout/ht/routing.h"

namespace ep {
namespace {

const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Where each rank's rows go, as its op message says.
struct Receiver {
  OutputShape output;
  Offset offsets[kHtMaxParts];

  static Receiver of(const HtDispatchParams& p, const HtExchange& exchange, int rank) {
    const auto word = [&](int index) { return exchange.message_word(rank, index); };
    Receiver receiver{p.output, {}};
    receiver.output.layout = static_cast<OutputLayout>(word(HtMessage::kLayout));
    receiver.output.capacity = word(HtMessage::kCapacity);
    receiver.output.alignment = static_cast<int>(word(HtMessage::kAlignment));
    for (int i = 0; i < kHtMaxParts; i++) {
      receiver.offsets[i] =
          word(HtMessage::kOffsets + 2 * i) | static_cast<uint64_t>(word(HtMessage::kOffsets + 2 * i + 1)) << 32;
    }
    return receiver;
  }
};

std::vector<uint32_t> message_words(const HtDispatchParams& p, const HtCounts& counts, int rank) {
  const int end = routes(p.variant) ? HtMessage::words(p.shape.num_ranks, p.shape.num_experts) : HtMessage::kCounts;
  std::vector<uint32_t> words(end - OpHeader::kWords, 0);
  uint32_t* word = words.data() - OpHeader::kWords;
  word[HtMessage::kLayout] = static_cast<uint32_t>(p.output.layout);
  word[HtMessage::kCapacity] = static_cast<uint32_t>(p.output.capacity);
  word[HtMessage::kAlignment] = static_cast<uint32_t>(p.output.alignment);
  for (int i = 0; i < kHtMaxParts; i++) {
    const Offset offset = i < p.num_parts ? p.parts[i].out_offset : kNoOffset;
    word[HtMessage::kOffsets + 2 * i] = static_cast<uint32_t>(offset);
    word[HtMessage::kOffsets + 2 * i + 1] = static_cast<uint32_t>(offset >> 32);
  }
  if (!routes(p.variant)) return words;
  const int32_t* rows = counts.rows.data() + static_cast<size_t>(rank) * p.shape.num_ranks;
  const int32_t* choices = counts.choices.data() + static_cast<size_t>(rank) * p.shape.num_experts;
  std::copy(rows, rows + p.shape.num_ranks, word + HtMessage::kCounts);
  std::copy(choices, choices + p.shape.num_experts, word + HtMessage::kCounts + p.shape.num_ranks);
  return words;
}

void take_counts(const HtDispatchParams& p, const HtExchange& exchange, HtCounts& counts) {
  for (int source = 0; source < p.shape.num_ranks; source++) {
    for (int r = 0; r < p.shape.num_ranks; r++) {
      counts.rows[static_cast<size_t>(source) * p.shape.num_ranks + r] =
          static_cast<int32_t>(exchange.message_word(source, HtMessage::kCounts + r));
    }
    for (int e = 0; e < p.shape.num_experts; e++) {
      counts.choices[static_cast<size_t>(source) * p.shape.num_experts + e] =
          static_cast<int32_t>(exchange.message_word(source, HtMessage::kCounts + p.shape.num_ranks + e));
    }
  }
}

// Counts of all ranks to the places of the own rows, and to what this rank will receive.
int64_t route(const HtDispatchParams& p, const HtCounts& counts, const std::vector<Receiver>& receivers,
              const HtExchange& exchange) {
  const int rank = exchange.rank();
  std::vector<OutputShape> outputs;
  for (const Receiver& receiver : receivers) outputs.push_back(receiver.output);
  place_tokens(p.shape, outputs, counts, rank, p.num_tokens, p.handle.own);
  std::copy(counts.rows.begin(), counts.rows.end(), p.handle.counts);
  for (int e = 0; e < p.shape.local_experts(); e++) {
    p.handle.expert_counts[e] = 0;
    for (int source = 0; source < p.shape.num_ranks; source++) {
      const size_t first = static_cast<size_t>(source) * p.shape.num_experts;
      p.handle.expert_counts[e] += counts.choices[first + rank * p.shape.local_experts() + e];
    }
  }
  *p.handle.alignment = p.output.alignment;
  *p.handle.dispatch = static_cast<int32_t>(exchange.tag());
  const Placement bins = place_bins(p.shape, p.output, counts, rank);
  fill_info(p.output, bins, p.info);
  if (p.host_sizes != nullptr) {
    p.host_sizes[0] = bins.starts.back();
    p.host_sizes[1] = first_slot(p.handle.counts, p.shape.num_ranks, p.shape.num_ranks, rank);
    std::copy_n(p.handle.expert_counts, p.shape.local_experts(), p.host_sizes + 2);
  }
  for (int r = 0; p.host_most_tokens != nullptr && r < p.shape.num_ranks; r++) {
    *p.host_most_tokens = std::max<int64_t>(*p.host_most_tokens, exchange.num_tokens(r));
  }
  return bins.dropped;
}

// One token's choices, and what travels with them.
struct TokenRoute {
  const int32_t *ids, *rows, *slots;  // [K]; ids of other ranks or domains may be among them
  const float* weights;               // [K], null: ones
  int token;                          // at its source
};

// Delivers rows in the own domain, and sends them to the rail peers of other domains.
class Sender {
 public:
  Sender(const HtDispatchParams& p, HtExchange& exchange, const std::vector<Receiver>& receivers)
      : p_(p), exchange_(exchange), receivers_(receivers), row_(p.offsets.row.stride()) {}

  void send_own() {
    const int topk = p_.shape.topk;
    for (int token = 0; token < p_.num_tokens; token++) {
      testing::delay(testing::Point::kBetweenRows, exchange_.rank());
      const size_t first = static_cast<size_t>(token) * topk;
      const HtRoutes& own = p_.handle.own;
      const TokenRoute route{own.ids + first, own.rows + first, own.slots + first,
                             p_.topk_weights ? p_.topk_weights + first : nullptr, token};
      load_row(token);
      deliver(route, row_.data());
      for (int other = 0; other < exchange_.num_domains(); other++) {
        if (other != exchange_.domain()) send_over_rail(route, other);
      }
    }
    if (exchange_.num_domains() == 1) return;
    for (int other = 0; other < exchange_.num_domains() && sends_metadata(p_.variant); other++) {
      if (other == exchange_.domain() || p_.num_tokens == 0) continue;
      const int peer = p_.offsets.rail_peer(exchange_.rank(), other);
      const uint64_t bytes = static_cast<uint64_t>(p_.num_tokens) * p_.offsets.route.stride();
      exchange_.put(peer, p_.offsets.route_in(exchange_.domain(), 0), p_.offsets.route_out(other, 0), bytes);
      exchange_.note_other(peer, bytes);
    }
    exchange_.signal_rail(HtSignal::kDispatchRail);
  }

  // Delivers what came from the rail peers.
  void hand_out() {
    if (exchange_.num_domains() == 1) return;
    exchange_.await_rail(HtSignal::kDispatchRail, Awaited::kRail);
    const int topk = p_.shape.topk;
    if (sends_metadata(p_.variant)) p_.handle.rail_tokens[exchange_.domain()] = 0;
    for (int source = 0; source < exchange_.num_domains(); source++) {
      if (source == exchange_.domain()) continue;
      if (sends_metadata(p_.variant)) {
        p_.handle.rail_tokens[source] = exchange_.num_tokens(p_.offsets.rail_peer(exchange_.rank(), source));
      }
      for (int token = 0; token < p_.handle.rail_tokens[source]; token++) {
        const size_t first = p_.offsets.rail_index(source, token) * topk;
        const HtRoutes& rail = p_.handle.rail;
        std::vector<float> weights(topk);
        if (sends_metadata(p_.variant)) take_route(source, token, weights);
        const TokenRoute route{rail.ids + first, rail.rows + first, rail.slots + first, weights.data(), token};
        deliver(route, exchange_.local(p_.offsets.rail_row_in(source, token)));
      }
    }
  }

 private:
  // The row as it travels: its parts, one after the other.
  void load_row(int token) {
    for (int i = 0; i < p_.num_parts; i++) {
      const HtPart& part = p_.parts[i];
      if (part.in == nullptr) continue;
      const char* in = at(part.in, token * part.row_stride);
      char* out = row_.data() + p_.offsets.row.offset[i];
      if (i == 0 && p_.options.quant != Quant::kNone) {
        std::vector<float> floats(p_.hidden);
        to_floats(p_.dtype, in, floats.data(), p_.hidden);
        quantize_row(p_.options.quant, floats.data(), p_.hidden, reinterpret_cast<uint8_t*>(out),
                     row_.data() + p_.offsets.row.offset[1], p_.tensor_scale != nullptr ? *p_.tensor_scale : 1);
        continue;
      }
      for (int j = 0; j < part.elements; j++) {
        std::memcpy(out + j * part.element_bytes, in + j * part.element_stride, part.element_bytes);
      }
    }
  }

  // To every rank of the own domain that has an expert of the token: the metadata, and the row to the place of the
  // first choice that fits. The receiver makes the copies for the other choices.
  void deliver(const TokenRoute& route, const char* row) {
    for (int step = 0; step < exchange_.topology().domain_size; step++) {
      const int peer = exchange_.lsa_peer(step);
      int32_t slot = kNoRow, first_row = kNoRow;
      for (int k = p_.shape.topk - 1; k >= 0; k--) {
        if (!is_at(route, k, peer)) continue;
        slot = route.slots[k];
        if (route.rows[k] < 0) continue;
        first_row = route.rows[k];
        exchange_.check_row(peer, first_row, receivers_[peer].output.rows());  // the receiver trusts all of them
      }
      if (slot == kNoRow) continue;
      if (sends_metadata(p_.variant)) send_slot(route, peer, slot);
      if (first_row < 0) continue;
      for (int i = 0; i < p_.num_parts; i++) {
        const Offset out = receivers_[peer].offsets[i];
        const int bytes = p_.parts[i].bytes;
        const Offset target = out == kNoOffset ? p_.offsets.staged_row(slot) + p_.offsets.row.offset[i]
                                               : out + static_cast<Offset>(first_row) * bytes;
        std::memcpy(exchange_.at(peer, target), row + p_.offsets.row.offset[i], bytes);
      }
      exchange_.note_row(peer, p_.offsets.row.body_bytes);
    }
  }

  bool is_at(const TokenRoute& route, int k, int rank) const {
    return route.ids[k] >= 0 && p_.shape.owner(route.ids[k]) == rank;
  }

  void send_slot(const TokenRoute& route, int peer, int32_t slot) {
    const HtSlotFormat& format = p_.offsets.slot;
    const bool expert_rows = has_expert_rows(receivers_[peer].output.layout);
    std::vector<uint32_t> words(format.words());
    for (int k = 0; k < p_.shape.topk; k++) {
      const bool is_there = is_at(route, k, peer);
      const int32_t place = !is_there ? kNoRow : expert_rows ? route.rows[k] : p_.shape.local_expert(route.ids[k]);
      words[format.place(k)] = static_cast<uint32_t>(place);
      words[format.weight(k)] = bits_of(!is_there ? 0.0f : route.weights == nullptr ? 1.0f : route.weights[k]);
    }
    words[format.token()] = static_cast<uint32_t>(route.token);
    std::memcpy(exchange_.at(peer, p_.offsets.slot_words(slot)), words.data(), words.size() * 4);
    exchange_.note_other(peer, words.size() * 4);
  }

  void send_over_rail(const TokenRoute& route, int domain) {
    const HtRouteFormat& format = p_.offsets.route;
    const int peer = p_.offsets.rail_peer(exchange_.rank(), domain);
    auto* words = reinterpret_cast<uint32_t*>(exchange_.local(p_.offsets.route_out(domain, route.token)));
    bool is_there = false;
    for (int k = 0; k < p_.shape.topk; k++) {
      const bool counts = route.ids[k] >= 0 && exchange_.topology().domain_of(p_.shape.owner(route.ids[k])) == domain;
      is_there = is_there || counts;
      if (!sends_metadata(p_.variant)) continue;
      words[format.expert(k)] = static_cast<uint32_t>(counts ? route.ids[k] : -1);
      words[format.row(k)] = static_cast<uint32_t>(route.rows[k]);
      words[format.slot(k)] = static_cast<uint32_t>(route.slots[k]);
      words[format.weight(k)] = bits_of(route.weights == nullptr ? 1.0f : route.weights[k]);
    }
    if (!is_there) return;
    const Offset out = p_.offsets.rail_row_out(domain, route.token);
    std::memcpy(exchange_.local(out), row_.data(), p_.offsets.row.body_bytes);
    exchange_.put(peer, p_.offsets.rail_row_in(exchange_.domain(), route.token), out, p_.offsets.row.body_bytes);
    exchange_.note_row(peer, p_.offsets.row.body_bytes);
  }

  void take_route(int source, int token, std::vector<float>& weights) {
    const HtRouteFormat& format = p_.offsets.route;
    const auto* words = reinterpret_cast<const int32_t*>(exchange_.local(p_.offsets.route_in(source, token)));
    const size_t first = p_.offsets.rail_index(source, token) * p_.shape.topk;
    for (int k = 0; k < p_.shape.topk; k++) {
      p_.handle.rail.ids[first + k] = words[format.expert(k)];
      p_.handle.rail.rows[first + k] = words[format.row(k)];
      p_.handle.rail.slots[first + k] = words[format.slot(k)];
      std::memcpy(&weights[k], words + format.weight(k), sizeof(float));
    }
  }

  const HtDispatchParams& p_;
  HtExchange& exchange_;
  const std::vector<Receiver>& receivers_;
  std::vector<char> row_;
};

void run(const HtDispatchParams& p, HtExchange& exchange, CpuState& state) {
  const int rank = exchange.rank();
  HtCounts counts = HtCounts::zero(p.shape);
  if (routes(p.variant)) {
    take_ids(p.shape, p.topk_idx, p.is_idx64, p.num_tokens, p.handle.own.ids, &state.invalid_ids);
    counts.count(p.shape, rank, p.handle.own.ids, p.num_tokens);
  }
  const std::vector<uint32_t> words = message_words(p, counts, rank);
  exchange.send_messages(words);
  exchange.await_headers(static_cast<int>(words.size()));
  std::vector<Receiver> receivers;
  for (int r = 0; r < p.shape.num_ranks; r++) receivers.push_back(Receiver::of(p, exchange, r));
  int64_t dropped = 0;
  if (routes(p.variant)) {
    take_counts(p, exchange, counts);
    dropped = route(p, counts, receivers, exchange);
  }
  if (sends_rows(p.variant)) {
    Sender sender(p, exchange, receivers);
    const bool is_early = testing::has_bug(testing::Bug::kEarlyRows) && p.num_tokens % 3 == 0;
    if (is_early) exchange.signal_domain(HtSignal::kDispatchRows);
    sender.send_own();
    sender.hand_out();
    if (!is_early) exchange.signal_domain(HtSignal::kDispatchRows);
    testing::delay(testing::Point::kBeforeReceive, rank);
    exchange.await_domain(HtSignal::kDispatchRows, Awaited::kRows);
    place_received(p, exchange);
    const bool is_staged =
        std::any_of(p.parts, p.parts + p.num_parts, [](const HtPart& part) { return part.out_offset == kNoOffset; });
    if (is_staged) state.ht_staged[0]++;
  }
  state.dropped_rows += dropped;
  exchange.complete();
}

}  // namespace

void cpu_ht_dispatch(const HtDispatchParams& p, Transport& transport, CpuState& state) {
  HtExchange exchange(transport, state, Kind::kDispatch, p.offsets, p.header, p.given_dispatch());
  try {
    run(p, exchange, state);
  } catch (const Error&) {  // the buffer has failed: nothing was received
    CpuArrivals::fail(p.arrivals);
    if (routes(p.variant)) std::fill(p.info, p.info + p.output.info_size(), 0);
    if (sends_metadata(p.variant)) clear_row_info(p.output, p.is_idx64, p.out_topk_idx, p.out_weights, p.row_expert);
    throw;
  }
}

}  // namespace ep
