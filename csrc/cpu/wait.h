// Waiting on the host: what a word of another rank is polled with.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "layout/wire.h"

namespace ep {

inline uint64_t pack(TaggedWord word) { return word.value | static_cast<uint64_t>(word.tag) << 32; }

inline std::atomic_ref<uint64_t> atomic_tagged(char* address) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address));
}

// The time by which all waits of a call must be over.
class Deadline {
 public:
  explicit Deadline(double seconds)
      : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}

  // False: it has passed, and `ready` was never true.
  template <class Ready>
  bool wait_until(Ready ready) const {
    for (int attempt = 0; !ready(); attempt++) {
      back_off(attempt);
      if (attempt % 64 == 63 && Clock::now() > end_) return false;
    }
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Ranks share few cores: give the core away soon, and sleep when nothing has happened for long.
  static void back_off(int attempt) {
    if (attempt < 4096) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  const Clock::time_point end_;
};

}  // namespace ep
