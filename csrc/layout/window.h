// A rank's whole window: the low-latency regions, then those of high throughput. One buffer serves both.
#pragma once

#include <optional>

#include "layout/ht/offsets.h"
#include "layout/ll/offsets.h"

namespace ep {

struct Window : LlWindow {
  HtWindow ht;

  static Window make(int num_ranks, const LlSizes& ll_sizes, const HtSizes& ht_sizes) {
    Window window{LlWindow::make(num_ranks, ll_sizes), {}};
    Carver carver(window.bytes);
    window.ht = HtWindow::make(carver, num_ranks, ht_sizes);
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
