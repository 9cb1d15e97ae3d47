// A rank's whole window: the low-latency regions, those of high throughput, the words of hosts. One buffer serves both
// modes.
#pragma once

#include <optional>

#include "layout/common/rank_mask.h"
#include "layout/ht/offsets.h"
#include "layout/ll/offsets.h"

namespace ep {

// What a host says to another when they meet (runtime/mask_meeting.h). All but the first are tagged words.
struct MeetingWords {
  static constexpr int kArrival = 0;  // its number << 32 | ranks that it has not masked; 0: it is not there
  static constexpr int kReport = 1;   // kReportWords of them
  static constexpr int kReportWords = 1 + 2 * kNumKinds;
  static constexpr int kDone = kReport + kReportWords;
  static constexpr int kMembers = kDone + 1;  // of a leader: words of a RankMask

  static uint64_t count(int num_ranks) { return kMembers + RankMask::words_of(num_ranks); }
};

struct Window : LlWindow {
  HtWindow ht;
  Region<uint64_t> meeting;  // [source][MeetingWords::count()]: with masks, of one domain

  static Window make(int num_ranks, const LlSizes& ll_sizes, const HtSizes& ht_sizes) {
    Window window{LlWindow::make(num_ranks, ll_sizes), {}, {}};
    Carver carver(window.bytes);
    window.ht = HtWindow::make(carver, num_ranks, ht_sizes);
    const bool is_one_domain = ll_sizes.rail_domain_size == 0;
    if (ll_sizes.by_source && is_one_domain)
      window.meeting = carver.take<uint64_t>(num_ranks * MeetingWords::count(num_ranks));
    window.bytes = align_up<uint64_t>(carver.used(), 4096);
    return window;
  }

  // The op header that `source` sends for the call of that epoch, if all of it is there. `word_at` loads a tagged word.
  template <class WordAt>
  std::optional<OpHeader> find_header(bool is_ht, Kind kind, uint64_t epoch, int num_ranks, int source,
                                      WordAt word_at) const {
    const int index = static_cast<int>(kind);
    const Offset headers = is_ht ? ht.messages[index].offset : this->kind[index].headers.offset;
    const uint64_t stride = (is_ht ? ht.words_of(kind) : OpHeader::kWords) * sizeof(TaggedWord);
    const Offset begin = headers + (static_cast<Offset>(bank_of(epoch)) * num_ranks + source) * stride;
    OpHeader header;
    for (int i = 0; i < OpHeader::kWords; i++) {
      const uint64_t word = word_at(begin + i * sizeof(TaggedWord));
      if (word >> 32 != tag_of(epoch)) return std::nullopt;
      header.words[i] = static_cast<uint32_t>(word);
    }
    return header;
  }
};

}  // namespace ep
