// Ranks that disagree about their next call wait for each other's op headers in different places of their windows: low
// latency and high throughput have their own, and so have dispatch and combine. So a rank that waits looks into the
// other ones, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "cpu/common/wait.h"
#include "layout/window.h"

namespace ep {

class NextCalls {
 public:
  NextCalls() = default;
  NextCalls(const Window& window, int num_ranks) : window_(window), num_ranks_(num_ranks) {}

  // This rank begins a call. Between the two parts of a split one, others may begin.
  void begin(bool is_ht, Kind kind, uint64_t epoch) { begun_[is_ht][static_cast<int>(kind)] = epoch; }

  // The header of a call that the source has begun and this rank has not, in another place than the given one. Where
  // all agree on the order of calls, the source has begun those that this rank has begun before, and their headers can
  // be seen from now on.
  std::optional<OpHeader> other_than(bool is_ht, Kind kind, int source, char* window) const {
    const auto word_at = [window](Offset at) { return atomic_tagged(window + at).load(std::memory_order_acquire); };
    for (const bool other_is_ht : {false, true}) {
      if (other_is_ht && window_.ht.message_words == 0) continue;
      for (const Kind other : {Kind::kDispatch, Kind::kCombine}) {
        if (other_is_ht == is_ht && other == kind) continue;
        const uint64_t next = begun_[other_is_ht][static_cast<int>(other)] + 1;
        const auto header = window_.find_header(other_is_ht, other, next, num_ranks_, source, word_at);
        if (header) return header;
      }
    }
    return std::nullopt;
  }

 private:
  Window window_;
  int num_ranks_ = 1;
  uint64_t begun_[2][kNumKinds] = {};  // epochs of this rank's last calls: low latency's, high throughput's
};

}  // namespace ep
