// One thread at a time calls a group.
#pragma once

#include <atomic>

#include "base/check.h"

namespace ep {

// An operation that is called. While it lives, those of other threads are refused, before they have done anything.
class OneCaller {
 public:
  explicit OneCaller(std::atomic<bool>& is_called) : is_called_(is_called) {
    EP_CHECK_USAGE(!is_called_.exchange(true, std::memory_order_acquire),
                   "another thread is in an operation of this buffer: one thread at a time calls it");
  }
  ~OneCaller() { is_called_.store(false, std::memory_order_release); }
  OneCaller(const OneCaller&) = delete;
  OneCaller& operator=(const OneCaller&) = delete;

 private:
  std::atomic<bool>& is_called_;
};

}  // namespace ep
