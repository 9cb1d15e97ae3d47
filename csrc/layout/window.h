// A rank's whole window: the low-latency regions, then those of high throughput. One buffer serves both.
#pragma once

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
};

}  // namespace ep
