// Low latency between domains (docs/network_protocol.md). What crosses goes by links. In the rail a link leads to a
// domain: to the rail peer there, the rank with the same lsa rank. In the mesh it leads to one rank.
#pragma once

#include <cstdint>

#include "layout/common/contexts.h"
#include "layout/common/region.h"
#include "layout/common/topology.h"
#include "layout/common/wire.h"
#include "layout/ll/rail_regions.h"

namespace ep {

constexpr int kMaxRailShare = 2048;
// Words of RankMasks of the ranks of a link, one for each token of a share.
constexpr int kMaxShareWords = 2 * kMaxRailShare;
// Bytes of a token's scalars, which combine_weights sends in place of a row.
EP_HD int scalar_row_bytes(int topk) { return align_up(topk * 4, 16); }

// One operation's view of the rail, of one rank.
struct LlRail {
  Kind kind = Kind::kDispatch;
  int num_domains = 1, domain_size = 1, num_links = 1, link_size = 1;
  int domain = 0, link = 0;  // of this rank; `link` is the one that others reach it by
  int links_inside = 1;      // of the own domain
  int place = 0, turn = 0;   // of this rank among those of its link; of its link in its domain
  int row_channels = kRowChannels;
  int row_bytes = 0;  // of a row on the network
  // Blocks of a launch: those of the rail that send, those that forward, and the others, amid which, behind the first
  // `sums_at`, lie those that add up the domain for home ranks elsewhere (combine).
  int send_blocks = 0, forward_blocks = 0, sums_at = 0, sum_blocks = 0;
  int slices = 1;  // of a channel of a link: so many blocks can share the work
  // A block divides before its first rows can leave.
  Divisor by_others, by_slices, by_row_channels;
  bool adds_rows = false;    // combine: what crosses is added up where the rows lie; else it lies in the window before
  bool places_rows = false;  // dispatch: what has crossed is placed from where it came; else from slots of the window
  uint64_t record_bytes = 0, rows_bytes = 0;  // of a link's part of a region
  int record_copies = 1;                      // RailRegions'
  int first_mask_signal = 0;
  Offset record_out = 0, record_in = 0, rows_out = 0, rows_in = 0, posted = 0;

  EP_HD int front_blocks() const { return send_blocks + forward_blocks; }
  EP_HD int blocks() const { return front_blocks() + sum_blocks; }
  // ---- Links
  EP_HD bool has_domain_sums() const { return link_size == domain_size; }  // else a link brings one rank's partial sums
  EP_HD int others() const { return num_links - links_inside; }            // links of other domains
  // The i-th of them, beginning behind the own domain, so that not all begin with the same.
  EP_HD int other(int i) const {
    const int turned = i + turn < others() ? i + turn : i + turn - others();
    const int a_link = (domain + 1) * links_inside + turned;
    return a_link < num_links ? a_link : a_link - num_links;
  }
  EP_HD int first_of(int a_link) const { return a_link * link_size; }  // of the ranks that it serves
  EP_HD int peer(int a_link) const { return first_of(a_link) + place; }
  EP_HD int link_of(int rank) const { return rank / link_size; }
  EP_HD bool is_far(int rank) const {
    return static_cast<unsigned>(rank - domain * domain_size) >= static_cast<unsigned>(domain_size);
  }

  // ---- Channels
  EP_HD int channels() const { return 1 + row_channels; }
  // Units of work: the slices of the channels to, or from, all links. First come those of the records.
  EP_HD int units() const { return others() * channels() * slices; }
  EP_HD int record_units() const { return others() * slices; }
  // Tokens of a row channel; the last ones may have fewer, or none. `tokens`: of the rank whose tokens they are.
  EP_HD int share(int tokens) const {
    return tokens > row_channels ? by_row_channels.divide(tokens + row_channels - 1) : 1;
  }
  void share_channels(int a_slices) {
    slices = a_slices;
    by_slices = Divisor::of(slices);
  }

  EP_HD Offset own_record(int bank, int a_link) const {
    return record_out + static_cast<uint64_t>(bank * record_copies + (record_copies > 1 ? a_link : 0)) * record_bytes;
  }
  EP_HD Offset record_from(int bank, int a_link) const {
    return record_in + static_cast<uint64_t>(bank * num_links + a_link) * record_bytes;
  }
  // Of the row of index `row`.
  EP_HD Offset row_to(int bank, int a_link, int row) const { return rows_out + row_at(bank, a_link, row); }
  EP_HD Offset row_from(int bank, int a_link, int row) const { return rows_in + row_at(bank, a_link, row); }

  // Names of the network: the signal of a channel of the peer of `a_link`, and what it must have come to at call
  // `epoch`. Calls of the other parity have words of their own: a put of the next call may land first.
  EP_HD int context(int channel) const { return static_cast<int>(kind) * kRailContexts + channel % kRailContexts; }
  EP_HD int signal(int parity, int a_link, int channel) const {
    return (parity * num_links + a_link) * channels() + channel;
  }
  EP_HD static uint64_t expected(uint64_t epoch) { return (epoch + 1) / 2; }
  // With masks: how often the signal of a channel was posted to the peer of `a_link`.
  EP_HD Offset posted_at(int parity, int a_link, int channel) const {
    return posted + static_cast<uint64_t>(signal(parity, a_link, channel)) * sizeof(uint64_t);
  }
  // With masks, words of one context, behind those of channels: what `rank` of another domain signals when it masks the
  // reader, and its heartbeats.
  static constexpr int kMaskContext = 0;
  EP_HD int mask_signal(int rank) const { return first_mask_signal + rank; }
  EP_HD int heartbeat_signal(int rank) const { return first_mask_signal + num_domains * domain_size + rank; }
  static int num_contexts() { return kNumKinds * kRailContexts; }
  // Of the rail or of the mesh, whichever needs more, and of masks: the words of high throughput lie behind them.
  static int num_signals(const Topology& topology) { return num_channel_signals(topology) + 2 * topology.num_ranks; }
  // Of a context to a peer that have not landed: those of two calls at most. With masks there are those that make up
  // for calls without a masked rank, the mask, and the heartbeats of the longest wait.
  static int max_outstanding(bool masks) {
    const int calls = kNumBanks * ceil_div(1 + kRowChannels, kRailContexts);
    return masks ? 2 * calls + 1 + kMaxDeadlines * kHeartbeatsPerDeadline : calls;
  }

  static LlRail make(const RailRegions& regions, Kind kind, const Topology& topology, int rank, int row_bytes) {
    LlRail rail;
    rail.kind = kind;
    rail.num_domains = topology.num_domains();
    rail.domain_size = topology.domain_size;
    rail.domain = topology.domain_of(rank);
    rail.link_size = regions.link_size;
    rail.num_links = topology.num_ranks / rail.link_size;
    rail.link = rail.link_of(rank);
    if (!rail.has_domain_sums()) rail.row_channels = kMeshRowChannels;
    rail.links_inside = rail.domain_size / rail.link_size;
    rail.place = topology.lsa_rank(rank) % rail.link_size;
    rail.turn = topology.lsa_rank(rank) % rail.links_inside;
    rail.by_others = Divisor::of(rail.others() > 0 ? rail.others() : 1);
    rail.by_row_channels = Divisor::of(rail.row_channels);
    rail.row_bytes = row_bytes;
    rail.record_bytes = regions.record_out.count / (static_cast<uint64_t>(kNumBanks) * regions.record_copies);
    rail.rows_bytes = regions.rows_out.count / (static_cast<uint64_t>(kNumBanks) * rail.num_links);
    rail.record_out = regions.record_out.offset;
    rail.record_in = regions.record_in.offset;
    rail.record_copies = regions.record_copies;
    rail.posted = regions.posted.offset;
    rail.first_mask_signal = num_channel_signals(topology);
    rail.rows_out = regions.rows_out.offset;
    rail.rows_in = regions.rows_in.offset;
    return rail;
  }

 private:
  static int num_channel_signals(const Topology& topology) {
    const int rail = topology.num_domains() * (1 + kRowChannels), mesh = topology.num_ranks * (1 + kMeshRowChannels);
    return kNumBanks * (rail > mesh ? rail : mesh);
  }
  EP_HD uint64_t row_at(int bank, int a_link, int row) const {
    return static_cast<uint64_t>(bank * num_links + a_link) * rows_bytes + static_cast<uint64_t>(row) * row_bytes;
  }
};

// A record: the op header, int32 ids [T, K] of all experts (-1: none), and a word for the weight of each.
struct RailRecord {
  EP_HD static int header_bytes() { return OpHeader::kWords * 4; }
  EP_HD static int ids_at() { return header_bytes(); }
  EP_HD static int weights_at(int entries) { return ids_at() + align_up(entries * 4, 16); }
  EP_HD static int bytes(int entries) { return weights_at(entries) + align_up(entries * 4, 16); }
};

}  // namespace ep
