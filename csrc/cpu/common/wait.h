// Waits on the host, and the atomic words of other ranks that they poll.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/interruption.h"
#include "layout/common/wire.h"

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

  explicit Deadline(double seconds) : length_(seconds), end_(Clock::now() + rounded(length_)) {}

  // Until `ready` is true. At any other end it was never true.
  template <class Ready>
  End wait_until(Ready ready) const {
    return wait_until(ready, [this](Clock::time_point now) { return now > end_; });
  }
  // The same; `is_late(now)` says whether the deadline has passed.
  template <class Ready, class IsLate>
  static End wait_until(Ready ready, IsLate is_late) {
    for (int attempt = 0; !ready(); attempt++) {
      back_off(attempt);
      if (attempt % 64 == 63 && is_late(Clock::now())) return End::kLate;
      if (attempt % 512 == 511 && attempt > kYields && has_interruption()) return End::kInterrupted;
    }
    return End::kReady;
  }

  // Whether it is too late to wait for a rank whose last heartbeat was at `lived_at`.
  bool is_late(Clock::time_point now, Clock::time_point lived_at) const {
    return now > end_ && (now > lived_at + length_ || now > end_ + rounded((kMaxDeadlines - 1) * length_));
  }

 private:
  using Seconds = std::chrono::duration<double>;
  static Clock::duration rounded(Seconds seconds) { return std::chrono::duration_cast<Clock::duration>(seconds); }
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

  Seconds length_;
  Clock::time_point end_;
};

}  // namespace ep
