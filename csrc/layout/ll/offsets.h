// The low-latency part of the window: for each kind of operation two banks, and in each bank an op header, routing
// words and a row slot for every (source rank, token). docs/architecture.md says how they are used.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout/common/region.h"
#include "layout/common/shape.h"
#include "layout/common/wire.h"
#include "layout/ll/rail_regions.h"

namespace ep {

// Bytes of one bank. Tagged words and rows keep their places for the life of the buffer, whatever the shapes of the
// operations: a word that was a tag is always a tag, a word that rests as kAbsent always does.
struct LlSizes {
  uint64_t tagged_bytes = 0;
  uint64_t row_bytes[kNumKinds] = {0, 0};
  // Of a combine, beside row_bytes: further rows of tokens (LlOffsets::unweighted_row), for each link or source.
  uint64_t unweighted_row_bytes = 0;
  // With masks, each source has a part of a bank for itself, whatever the shapes: what a masked rank has left there
  // lies in no other rank's way.
  bool by_source = false;
  // Over a network of GPUs: ranks of a domain; 0: the world is one domain, or the network is the host's. And those that
  // a link serves.
  int rail_domain_size = 0, link_size = 0;
};

struct LlWindow {
  Region<uint64_t>
      signals;  // [kind][source]: stages that have arrived over a network; CUDA: credits. Each has one writer
  struct PerKind {
    Region<TaggedWord> headers;  // [bank][source][OpHeader::kWords]
    Region<TaggedWord> tagged;   // [bank][tagged words]
    Region<uint32_t> rows;       // [bank][row words]
  } kind[kNumKinds];
  Region<uint64_t> heartbeats;  // [source]: with masks, heartbeats; each has one writer
  RailRegions rail[kNumKinds];  // of several domains of GPUs
  uint64_t bytes = 0;
  bool by_source = false;
  int num_links = 1;  // over a network of GPUs: of all domains

  static LlWindow make(int num_ranks, const LlSizes& sizes) {
    Carver carver;
    LlWindow window;
    window.by_source = sizes.by_source;
    const bool has_links = sizes.rail_domain_size > 0 && sizes.rail_domain_size < num_ranks;
    if (has_links) window.num_links = num_ranks / sizes.link_size;
    const uint64_t places = sizes.by_source ? num_ranks : window.num_links;  // of further rows
    const uint64_t row_bytes[kNumKinds] = {sizes.row_bytes[0],
                                           sizes.row_bytes[1] + places * sizes.unweighted_row_bytes};
    window.signals = carver.take<uint64_t>(static_cast<uint64_t>(kNumKinds) * num_ranks);
    for (int k = 0; k < kNumKinds; k++) {
      PerKind& kind = window.kind[k];
      kind.headers = carver.take<TaggedWord>(static_cast<uint64_t>(kNumBanks) * num_ranks * OpHeader::kWords);
      kind.tagged = carver.take<TaggedWord>(kNumBanks * align_up<uint64_t>(sizes.tagged_bytes, 128) / 8);
      kind.rows = carver.take<uint32_t>(kNumBanks * align_up<uint64_t>(row_bytes[k], 128) / 4);
    }
    window.heartbeats = carver.take<uint64_t>(num_ranks);
    for (int k = 0; k < kNumKinds && has_links; k++) {
      const Topology topology{num_ranks, sizes.rail_domain_size};
      const uint64_t slots = std::max(sizes.row_bytes[0], sizes.row_bytes[k]);
      window.rail[k] = RailRegions::take(carver, topology, sizes.link_size, sizes.by_source, sizes.tagged_bytes, slots);
    }
    window.bytes = align_up<uint64_t>(carver.used(), 4096);
    return window;
  }
};

// Offsets of one operation's words in any rank's window.
struct LlOffsets {
  int num_ranks = 1;
  int max_tokens = 1;
  int topk = 1;
  IdFormat ids;
  int row_stride = 0;
  Offset signals = 0;
  Offset headers = 0, tagged = 0, rows = 0;            // bank 0
  uint64_t tagged_bank_bytes = 0, row_bank_bytes = 0;  // from one bank to the next
  bool by_source = false;
  uint32_t tagged_part_bytes = 0;  // by_source
  uint32_t row_part_bytes = 0;     // from one source to the next

  EP_HD Offset signal(int source) const { return signals + static_cast<Offset>(source) * 8; }
  EP_HD Offset header(int bank, int source) const {
    return headers + static_cast<Offset>(bank * num_ranks + source) * (OpHeader::kWords * sizeof(TaggedWord));
  }
  EP_HD int id_bytes() const { return ids.words() * static_cast<int>(sizeof(TaggedWord)); }
  EP_HD uint64_t slot(int source, int token) const { return static_cast<uint64_t>(source) * max_tokens + token; }
  // kBySource: by_source. Kernels know it, as it takes more instructions.
  template <bool kBySource>
  EP_HD Offset id_words(int bank, int source, int token) const {
    const Offset first = tagged + bank * tagged_bank_bytes;
    if (kBySource) return first + tagged_part(source) + static_cast<uint64_t>(token) * id_bytes();
    return first + slot(source, token) * id_bytes();
  }
  template <bool kBySource>
  EP_HD Offset weight(int bank, int source, int token, int k) const {
    const Offset first = tagged + bank * tagged_bank_bytes;
    if (kBySource) {
      const uint64_t index = static_cast<uint64_t>(token) * topk + k;
      return first + tagged_part(source) + static_cast<uint64_t>(max_tokens) * id_bytes() + index * sizeof(TaggedWord);
    }
    return first + static_cast<uint64_t>(num_ranks) * max_tokens * id_bytes() +
           (slot(source, token) * topk + k) * sizeof(TaggedWord);
  }
  template <bool kBySource>
  EP_HD Offset row(int bank, int source, int token) const {
    const Offset first = rows + bank * row_bank_bytes;
    if (kBySource) {
      return first + static_cast<uint64_t>(source) * row_part_bytes + static_cast<uint64_t>(token) * row_stride;
    }
    return first + slot(source, token) * row_stride;
  }
  EP_HD Offset id_words(int bank, int source, int token) const {
    return by_source ? id_words<true>(bank, source, token) : id_words<false>(bank, source, token);
  }
  EP_HD Offset weight(int bank, int source, int token, int k) const {
    return by_source ? weight<true>(bank, source, token, k) : weight<false>(bank, source, token, k);
  }
  EP_HD Offset row(int bank, int source, int token) const {
    return by_source ? row<true>(bank, source, token) : row<false>(bank, source, token);
  }

  // A combine whose rows travel unweighted: where the rank that adds them up finds the row of choice k of a token,
  // whose home rank `link` serves (0 in one domain). The first row of a source lies in the slot of its sum. Further
  // ones lie behind all slots, one for each choice but the first; by_source, behind the slots of their source.
  template <bool kBySource>
  EP_HD Offset unweighted_row(int bank, int source, int token, int k, bool is_first, int link) const {
    if (kBySource) return row<true>(bank, source, token + (is_first ? 0 : k * max_tokens));
    return row<false>(bank, is_first ? source : num_ranks + link * (topk - 1) + k - 1, token);
  }
  EP_HD Offset unweighted_row(int bank, int source, int token, int k, bool is_first) const {
    return by_source ? unweighted_row<true>(bank, source, token, k, is_first, 0)
                     : unweighted_row<false>(bank, source, token, k, is_first, 0);
  }

  static uint64_t tagged_bytes(const Shape& shape) {
    const IdFormat ids = IdFormat::make(shape.local_experts(), shape.topk);
    const uint64_t words = static_cast<uint64_t>(shape.max_tokens) * (ids.words() + shape.topk);
    return shape.num_ranks * align_up<uint64_t>(words * sizeof(TaggedWord), kPartAlignment);
  }
  static uint64_t row_bytes(const Shape& shape, int row_stride) {
    return static_cast<uint64_t>(shape.num_ranks) * shape.max_tokens * row_stride;
  }
  static uint64_t unweighted_row_bytes(const Shape& shape, int row_stride) {
    return static_cast<uint64_t>(shape.topk - 1) * shape.max_tokens * row_stride;
  }

  // Whether a combine's banks have room for a row of every choice.
  static bool fits_unweighted_rows(const LlWindow& window, const Shape& shape, const RowFormat& row) {
    const uint64_t bank_bytes = bank_row_bytes(window, Kind::kCombine);
    const uint64_t slots = row_bytes(shape, row.stride()), further = unweighted_row_bytes(shape, row.stride());
    if (window.num_links > 1 && shape.topk > kMostFarChoices) return false;
    if (!window.by_source) return slots + static_cast<uint64_t>(window.num_links) * further <= bank_bytes;
    return slots / shape.num_ranks + further <= part_bytes(bank_bytes, shape.num_ranks, kRowAlignment);
  }
  // Between domains a word has a bit for each choice that has a row, and one that says that there is a sum of them.
  static constexpr int kMostFarChoices = 31;
  static constexpr uint32_t kHasSum = 1u << kMostFarChoices;

  static LlOffsets make(const LlWindow& window, Kind kind, const Shape& shape, const RowFormat& row) {
    const LlWindow::PerKind& regions = window.kind[static_cast<int>(kind)];
    LlOffsets offsets;
    offsets.num_ranks = shape.num_ranks;
    offsets.max_tokens = shape.max_tokens;
    offsets.topk = shape.topk;
    offsets.ids = IdFormat::make(shape.local_experts(), shape.topk);
    offsets.row_stride = row.stride();
    offsets.signals = window.signals.at(static_cast<uint64_t>(kind) * shape.num_ranks);
    offsets.headers = regions.headers.offset;
    offsets.tagged = regions.tagged.offset;
    offsets.rows = regions.rows.offset;
    offsets.tagged_bank_bytes = regions.tagged.count * sizeof(TaggedWord) / kNumBanks;
    offsets.row_bank_bytes = bank_row_bytes(window, kind);
    offsets.by_source = window.by_source;
    offsets.tagged_part_bytes = part_bytes(offsets.tagged_bank_bytes, shape.num_ranks, kPartAlignment);
    offsets.row_part_bytes = part_bytes(offsets.row_bank_bytes, shape.num_ranks, kRowAlignment);
    const uint64_t need_tagged = tagged_bytes(shape);
    const uint64_t need_rows = row_bytes(shape, offsets.row_stride);
    const auto ranks = static_cast<uint64_t>(shape.num_ranks);
    EP_CHECK(need_tagged <= offsets.tagged_part_bytes * ranks && need_rows <= offsets.row_part_bytes * ranks,
             "the window is too small for ", shape.max_tokens, " tokens a rank, top-", shape.topk, ", rows of ",
             row.wire_bytes(), " bytes: a bank needs ", need_tagged, " bytes of routing and ", need_rows,
             kind == Kind::kDispatch ? " bytes of rows, it has " : " bytes of partial sums, it has ",
             offsets.tagged_bank_bytes, " and ", offsets.row_bank_bytes);
    if (!offsets.by_source) offsets.row_part_bytes = static_cast<uint32_t>(need_rows / ranks);
    return offsets;
  }

 private:
  static constexpr int kPartAlignment = 16, kRowAlignment = 128;

  static uint64_t bank_row_bytes(const LlWindow& window, Kind kind) {
    return window.kind[static_cast<int>(kind)].rows.count * sizeof(uint32_t) / kNumBanks;
  }
  EP_HD Offset tagged_part(int source) const { return static_cast<uint64_t>(source) * tagged_part_bytes; }
  static uint32_t part_bytes(uint64_t bank_bytes, int num_ranks, uint32_t alignment) {
    const uint64_t most = UINT32_MAX;
    return static_cast<uint32_t>(std::min(bank_bytes / num_ranks, most) / alignment * alignment);
  }
};

}  // namespace ep
