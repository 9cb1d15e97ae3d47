// High throughput between domains of GPUs, where only a network leads: what a rank sends its rail peers, where it lies,
// and which signals announce it. docs/network_protocol.md says how it is used.
#pragma once

#include "base/check.h"
#include "layout/common/contexts.h"
#include "layout/ht/offsets.h"

namespace ep {

// A call of a kind sends each rail peer all channels once, each with one signal that grows by 1, however little there
// is to send: the op message; the weights that a home rank gives to a combine; the rows, in chunks.
constexpr int kRecordChannel = 0, kWeightsChannel = 1, kFirstChunkChannel = 2;
constexpr int kHtRailChannels = kFirstChunkChannel + kHtRailChunks;

// Rows of a chunk at most, of a home rank that has `tokens`. Its rows for a domain have places from 0 on, and lie one
// after the other, chunk by chunk: no chunk is begun before the one in front of it is full.
EP_HD int ht_rail_share(int tokens) { return tokens > kHtRailChunks ? ceil_div(tokens, kHtRailChunks) : 1; }

// What lies in front of a dispatch's chunk.
struct HtRailHeader {
  int32_t rows;  // of the chunk
  int32_t all;   // of the last chunk that has a header, where the handle is made: rows of all chunks
  int32_t unused[2];
};
static_assert(sizeof(HtRailHeader) == 16 && sizeof(HtRailHeader) * kHtRailChunks == kHtRailSlack);

// One operation's view of the rail, of one rank.
struct HtRail {
  Kind kind = Kind::kDispatch;
  int num_domains = 1, domain_size = 1;
  int domain = 0, lsa_rank = 0;  // of this rank
  int entry_bytes = 0;           // of a row on the network; of a dispatch its route is the end of it
  int route_at = 0;
  int topk = 1;
  int first_signal = 0;       // behind those of low latency
  uint64_t domain_bytes = 0;  // of a domain's part of rows_out and rows_in
  uint64_t record_bytes = 0;  // the room for an op message
  Offset records_out = 0, records_in = 0, rows_out = 0, rows_in = 0, weights_out = 0, weights_in = 0;
  uint64_t weights_bytes = 0;  // of a domain's part

  EP_HD int others() const { return num_domains - 1; }
  // The i-th of the other domains, beginning behind the own one, so that not all begin with the same.
  EP_HD int other(int i) const { return (domain + 1 + i) % num_domains; }
  EP_HD int peer(int a_domain) const { return a_domain * domain_size + lsa_rank; }
  EP_HD int domain_of(int rank) const { return rank / domain_size; }
  EP_HD bool is_near(int rank) const { return domain_of(rank) == domain; }
  EP_HD int near_rank(int lsa) const { return domain * domain_size + lsa; }

  EP_HD Offset own_record(int bank) const { return records_out + bank * record_bytes; }
  EP_HD Offset record_from(int bank, int a_domain) const {
    return records_in + static_cast<uint64_t>(bank * num_domains + a_domain) * record_bytes;
  }

  // Rows for a domain, or from it. `share`: of the rank whose tokens they are.
  EP_HD Offset out_part(int a_domain) const { return rows_out + a_domain * domain_bytes; }
  EP_HD Offset in_part(int a_domain) const { return rows_in + a_domain * domain_bytes; }
  EP_HD uint64_t chunk_at(int share, int chunk) const {
    return chunk * (sizeof(HtRailHeader) + static_cast<uint64_t>(share) * entry_bytes);
  }
  EP_HD uint64_t entry_at(int share, int place) const {
    const int chunk = place / share;
    return chunk_at(share, chunk) + sizeof(HtRailHeader) + static_cast<uint64_t>(place - chunk * share) * entry_bytes;
  }

  // Weights and marks of the choices of a row, by its place: [K] marks, [K] weights.
  EP_HD int weight_bytes() const { return align_up(8 * topk, 16); }
  EP_HD Offset weights_to(int a_domain, int place) const { return weights_out + weights_part(a_domain, place); }
  EP_HD Offset weights_from(int a_domain, int place) const { return weights_in + weights_part(a_domain, place); }

  // Names of the network, beside those of low latency: the signal of a channel of the rail peer in `a_domain`, and what
  // it must have come to at call `epoch`. Calls of the other parity have words of their own.
  EP_HD int context(int channel) const { return static_cast<int>(kind) * kRailContexts + channel % kRailContexts; }
  EP_HD int signal(int parity, int a_domain, int channel) const {
    return first_signal + (parity * num_domains + a_domain) * kHtRailChannels + channel;
  }
  EP_HD static uint64_t expected(uint64_t epoch) { return (epoch + 1) / 2; }
  static int num_signals(int num_domains) { return kNumBanks * num_domains * kHtRailChannels; }
  static int max_outstanding() { return kNumBanks * ceil_div(kHtRailChannels, kRailContexts); }

  // `route_bytes`: of a row's route. `first_signal`: low latency has those before.
  static HtRail make(const HtWindow& window, Kind kind, const Topology& topology, int rank, const Shape& shape,
                     const HtRowFormat& row, int route_bytes, int first_signal) {
    HtRail rail;
    rail.kind = kind;
    rail.num_domains = topology.num_domains();
    rail.domain_size = topology.domain_size;
    rail.domain = topology.domain_of(rank);
    rail.lsa_rank = topology.lsa_rank(rank);
    rail.topk = shape.topk;
    rail.first_signal = first_signal;
    rail.route_at = row.body_bytes;
    rail.entry_bytes = row.body_bytes + route_bytes;
    rail.domain_bytes = static_cast<uint64_t>(shape.max_tokens) * rail.entry_bytes + kHtRailSlack;
    rail.record_bytes = window.words_of(kind) * sizeof(uint32_t);
    const auto kind_index = static_cast<uint64_t>(kind);
    rail.records_out = window.records_out.at(kind_index * kNumBanks * window.message_words);
    rail.records_in = window.records_in.at(kind_index * kNumBanks * rail.num_domains * window.message_words);
    rail.rows_out = window.rail_out.offset;
    rail.rows_in = window.rail_in.offset;
    rail.weights_bytes = kind == Kind::kCombine ? static_cast<uint64_t>(shape.max_tokens) * rail.weight_bytes() : 0;
    const uint64_t rows = rail.num_domains * rail.domain_bytes, need = rows + rail.num_domains * rail.weights_bytes;
    rail.weights_out = rail.rows_out + rows;
    rail.weights_in = rail.rows_in + rows;
    EP_CHECK(need <= window.rail_in.count, shape.max_tokens, " rows of ", row.body_bytes,
             " bytes do not fit the network's part of the window: high throughput needs ", need,
             " bytes there, it has ", window.rail_in.count, "; make the buffer for as many");
    return rail;
  }

 private:
  EP_HD uint64_t weights_part(int a_domain, int place) const {
    return a_domain * weights_bytes + static_cast<uint64_t>(place) * weight_bytes();
  }
};

}  // namespace ep
