// The high-throughput (HT) part of the window, which lies behind the low-latency part: op messages, signals that grow,
// slots and staging rows for one operation, what crosses between domains, and the arena, in which outputs lie.
// docs/architecture.md says how they are used.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "layout/common/region.h"
#include "layout/common/shape.h"
#include "layout/common/topology.h"
#include "layout/common/wire.h"
#include "layout/ht/handle.h"

namespace ep {

constexpr int kHtMaxParts = 8;             // tensors that one dispatch moves, scales included
constexpr Offset kNoOffset = ~0ull;        // of a tensor that is not in the arena
constexpr uint64_t kArenaAlignment = 512;  // of its extents, as torch's allocator aligns

// Words of 64 bits that only grow, one for each (signal, source rank): the source stores the epoch of its operation of
// that kind. Signals to ranks of other domains follow puts, the others follow stores.
enum class HtSignal : int {
  kDispatchMessage = 0,  // other domains: the op message has landed
  kDispatchRail,         // other domains: rows and routes for this domain have landed
  kDispatchRows,         // own domain: all rows lie in place; on CPU ranks their metadata is there too
  kCombineMessage,       // other domains
  kCombineRailWeights,   // other domains: weights given at combine
  kCombineWeights,       // own domain: the same, at their slots
  kCombineReady,         // own domain: the source's rows may be read
  kCombineRail,          // other domains: their sums have landed
  kCombineDone,          // own domain: the source has read all that it reads
  kDispatchMetadata,     // CUDA: the rows' metadata lies at the slots
};
constexpr int kNumHtSignals = 10;

// CUDA announces the rows of one rank to another in chunks, so that the receiver can begin before the last row has
// come: the signal's line holds a word for each chunk.
constexpr int kHtChunks = 16;
// Of many ranks fewer: a block has a table of all chunks of all ranks in its shared memory.
EP_HD int ht_chunks(int num_ranks) {
  constexpr int kEntries = 64 * kHtChunks;
  const int chunks = kEntries / num_ranks;
  return chunks < 1 ? 1 : chunks < kHtChunks ? chunks : kHtChunks;
}
EP_HD int chunk_of(int index, int count, int chunks) { return index * chunks / count; }
EP_HD int chunk_begin(int chunk, int count, int chunks) { return ceil_div(chunk * count, chunks); }
EP_HD int chunk_size(int chunk, int count, int chunks) {
  return chunk_begin(chunk + 1, count, chunks) - chunk_begin(chunk, count, chunks);
}

// Between domains of GPUs the rows for a rail peer travel in so many chunks (rail.h); what they need of a domain's part
// of a region beside rows.
constexpr int kHtRailChunks = 16;
constexpr uint64_t kHtRailSlack = 16 * kHtRailChunks;

// An op message, in tagged words: the op header, the output into which the sender of the message receives, then
// (dispatch) the counts of its choices.
struct HtMessage {
  enum Word {
    kLayout = OpHeader::kWords,  // of the output
    kCapacity,
    kAlignment,
    kOffsets,  // of each part's output in the sender's arena, low word first; kNoOffset: staged
    kChunks =
        kOffsets + 2 * kHtMaxParts,  // CUDA: chunks in which the sender of the message wants its rows to be announced
    kCounts = 32,
  };
  static_assert(kChunks < kCounts);
  // kCounts: tokens with an expert of rank r [R] | choices of expert e [E].
  EP_HD static int words(int num_ranks, int num_experts) { return kCounts + num_ranks + num_experts; }
};

// Bytes of the regions; all 0 where a buffer has no HT.
struct HtSizes {
  uint64_t message_words = 0;  // of a dispatch's op message
  uint64_t slot_bytes = 0;     // metadata of received rows
  uint64_t row_bytes = 0;      // staged rows
  uint64_t route_bytes = 0;    // several domains: routes that cross, of one direction
  uint64_t rail_bytes = 0;     // several domains: rows that cross, of one direction
  uint64_t arena_bytes = 0;
  // Over a network of GPUs: ranks of a domain; 0: the world is one domain, or the network is the host's.
  int rail_domain_size = 0;

  bool any() const { return message_words > 0; }
};

struct HtWindow {
  Region<uint64_t> signals;                // [kNumHtSignals][R], each on a line of its own
  Region<TaggedWord> messages[kNumKinds];  // op messages: [bank][source][words_of(kind)]
  Region<char> slots;
  Region<char> rows;
  Region<char> routes_out, routes_in;
  Region<char> rail_out, rail_in;
  // Of several domains of GPUs. rail_out and rail_in have the bytes of routes and rows, in whose place an operation
  // lays out its own.
  Region<uint32_t> records_out;  // op messages for the rail peers: [kind][bank][words_of(kind)]
  Region<uint32_t> records_in;   // [kind][bank][domain][words_of(kind)]
  Region<char> arena;
  uint64_t message_words = 0;  // of a dispatch; 0: the buffer has no high throughput

  static constexpr int kSignalStride = 128;
  static_assert(kHtChunks * sizeof(uint64_t) <= kSignalStride);

  // Of an op message. Only a dispatch has counts.
  uint64_t words_of(Kind kind) const {
    return kind == Kind::kDispatch || message_words == 0 ? message_words : uint64_t{HtMessage::kCounts};
  }

  static HtWindow make(Carver& carver, int num_ranks, const HtSizes& sizes) {
    HtWindow window;
    if (!sizes.any()) return window;
    window.message_words = align_up<uint64_t>(sizes.message_words, 16);
    window.signals = carver.take<uint64_t>(static_cast<uint64_t>(kNumHtSignals) * num_ranks * kSignalStride / 8);
    uint64_t all_words = 0;
    for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
      const uint64_t words = window.words_of(kind);
      window.messages[static_cast<int>(kind)] = carver.take<TaggedWord>(kNumBanks * num_ranks * words);
      all_words += words;
    }
    window.slots = carver.take<char>(sizes.slot_bytes);
    window.rows = carver.take<char>(sizes.row_bytes);
    if (sizes.rail_domain_size > 0) {
      const auto domains = static_cast<uint64_t>(num_ranks / sizes.rail_domain_size);
      const uint64_t rail_bytes = sizes.route_bytes + sizes.rail_bytes + domains * kHtRailSlack;
      window.records_out = carver.take<uint32_t>(kNumBanks * all_words);
      window.records_in = carver.take<uint32_t>(kNumBanks * domains * all_words);
      window.rail_out = carver.take<char>(rail_bytes);
      window.rail_in = carver.take<char>(rail_bytes);
    } else {
      window.routes_out = carver.take<char>(sizes.route_bytes);
      window.routes_in = carver.take<char>(sizes.route_bytes);
      window.rail_out = carver.take<char>(sizes.rail_bytes);
      window.rail_in = carver.take<char>(sizes.rail_bytes);
    }
    window.arena = carver.take<char>(sizes.arena_bytes, 4096);
    return window;
  }
};

// The parts of a row that is staged, or crosses between domains: each on a multiple of 16 bytes.
struct HtRowFormat {
  int num_parts = 0;
  int bytes[kHtMaxParts] = {};
  int offset[kHtMaxParts] = {};
  int body_bytes = 0;

  void add(int part_bytes) {
    bytes[num_parts] = part_bytes;
    offset[num_parts++] = body_bytes;
    body_bytes += align_up(part_bytes, 16);
  }
  EP_HD int stride() const { return align_up(body_bytes, 128); }
};

// The route that travels with a row to the rail peer that delivers it in its domain: for each choice its expert (-1:
// not in that domain), output row, slot, weight; on GPUs behind them the token at its source.
struct HtRouteFormat {
  int topk = 1;

  EP_HD int expert(int k) const { return k; }
  EP_HD int row(int k) const { return topk + k; }
  EP_HD int slot(int k) const { return 2 * topk + k; }
  EP_HD int weight(int k) const { return 3 * topk + k; }
  EP_HD int words() const { return 4 * topk; }
  EP_HD int stride() const { return words() * 4; }
  EP_HD int token() const { return words(); }
  EP_HD int bytes_with_token() const { return align_up(stride() + 4, 16); }
};

// Offsets of one operation's words in any rank's window. A slot is a received row's number in the order (source rank,
// token), whether or not the capacity has room for it: at most R * M.
struct HtOffsets {
  Topology topology;
  int max_tokens = 1;
  HtRowFormat row;
  HtSlotFormat slot;
  HtRouteFormat route;
  uint64_t message_words = 0;
  Offset signals = 0, messages = 0, slots = 0, rows = 0;
  Offset routes_out = 0, routes_in = 0, rail_out = 0, rail_in = 0;
  Offset arena_end = 0;  // where rows are read in place

  EP_HD Offset signal(HtSignal which, int source) const {
    return signals +
           static_cast<Offset>(static_cast<int>(which) * topology.num_ranks + source) * HtWindow::kSignalStride;
  }
  EP_HD Offset message_word(int bank, int source, int index) const {
    return messages +
           ((static_cast<uint64_t>(bank) * topology.num_ranks + source) * message_words + index) * sizeof(TaggedWord);
  }
  EP_HD Offset slot_words(int64_t slot_index) const { return slots + slot_index * slot.stride(); }
  EP_HD Offset staged_row(int64_t slot_index) const { return rows + slot_index * row.stride(); }
  // Tokens of the rail peer of `domain` that come, or go, through this rank.
  EP_HD uint64_t rail_index(int domain, int token) const { return static_cast<uint64_t>(domain) * max_tokens + token; }
  EP_HD Offset route_out(int domain, int token) const {
    return routes_out + rail_index(domain, token) * route.stride();
  }
  EP_HD Offset route_in(int domain, int token) const { return routes_in + rail_index(domain, token) * route.stride(); }
  EP_HD Offset rail_row_out(int domain, int token) const { return rail_out + rail_index(domain, token) * row.stride(); }
  EP_HD Offset rail_row_in(int domain, int token) const { return rail_in + rail_index(domain, token) * row.stride(); }

  // The rank of `domain` that delivers there what `rank` sends.
  EP_HD int rail_peer(int rank, int domain) const { return domain * topology.domain_size + topology.lsa_rank(rank); }

  static HtOffsets make(const HtWindow& window, Kind kind, const Topology& topology, const Shape& shape,
                        const HtRowFormat& row) {
    HtOffsets offsets;
    offsets.topology = topology;
    offsets.max_tokens = shape.max_tokens;
    offsets.row = row;
    offsets.slot = {shape.topk};
    offsets.route = {shape.topk};
    offsets.message_words = window.words_of(kind);
    offsets.signals = window.signals.offset;
    offsets.messages = window.messages[static_cast<int>(kind)].offset;
    offsets.slots = window.slots.offset;
    offsets.rows = window.rows.offset;
    offsets.routes_out = window.routes_out.offset;
    offsets.routes_in = window.routes_in.offset;
    offsets.rail_out = window.rail_out.offset;
    offsets.rail_in = window.rail_in.offset;
    offsets.arena_end = window.arena.offset + window.arena.count;
    const HtSizes need = sizes(topology, shape, row.stride());
    const bool has_records = window.records_in.count > 0;  // then an operation checks its own rows (HtRail)
    EP_CHECK(need.message_words <= window.message_words && need.slot_bytes <= window.slots.count &&
                 need.row_bytes <= window.rows.count && (has_records || need.route_bytes <= window.routes_in.count) &&
                 (has_records || need.rail_bytes <= window.rail_in.count),
             "the window is too small for high throughput of ", shape.max_tokens, " tokens a rank, top-", shape.topk,
             " of ", shape.num_experts, " experts, rows of ", row.body_bytes, " bytes: it needs ", need.message_words,
             " words of counts, ", need.slot_bytes, " bytes of routes and ", need.row_bytes, " of rows, it has ",
             window.message_words, ", ", window.slots.count, " and ", window.rows.count);
    return offsets;
  }

  static HtSizes sizes(const Topology& topology, const Shape& shape, int row_stride) {
    const uint64_t slots = static_cast<uint64_t>(shape.num_ranks) * shape.max_tokens;
    const uint64_t crossing =
        topology.num_domains() == 1 ? 0 : static_cast<uint64_t>(topology.num_domains()) * shape.max_tokens;
    HtSizes sizes;
    sizes.message_words = HtMessage::words(shape.num_ranks, shape.num_experts);
    sizes.slot_bytes = slots * HtSlotFormat{shape.topk}.stride();
    sizes.row_bytes = slots * row_stride;
    sizes.route_bytes = crossing * HtRouteFormat{shape.topk}.bytes_with_token();
    sizes.rail_bytes = crossing * row_stride;
    return sizes;
  }
};

}  // namespace ep
