// Waiting on the host: what a word of another rank is polled with.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/interruption.h"
#include "layout/wire.h"

namespace ep {

inline uint64_t pack(TaggedWord word) { return word.value | static_cast<uint64_t>(word.tag) << 32; }

inline std::atomic_ref<uint64_t> atomic_tagged(char* address) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address));
}

// The time by which all waits of a call must be over.
class Deadline {
  using Clock = std::chrono::steady_clock;

 public:
  enum class End { kReady, kLate, kInterrupted };

  explicit Deadline(double seconds)
      : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}

  // Till `ready` is true, which it never was at another end.
  template <class Ready>
  End wait_until(Ready ready) const {
    for (int attempt = 0; !ready(); attempt++) {
      back_off(attempt);
      if (attempt % 64 == 63 && Clock::now() > end_) return End::kLate;
      if (attempt % 512 == 511 && attempt > kYields && has_interruption()) return End::kInterrupted;
    }
    return End::kReady;
  }

 private:
  static constexpr int kYields = 4096;

  static bool has_interruption() {
    const auto asks = is_interrupted.load(std::memory_order_relaxed);
    return asks != nullptr && asks();
  }
  // Ranks share few cores: give the core away soon, and sleep when nothing has happened for long.
  static void back_off(int attempt) {
    if (attempt < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  Clock::time_point end_;
};

}  // namespace ep
