// Waits on the host, and the atomic words of other ranks that they poll.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <thread>

#include "base/interruption.h"
#include "layout/common/wire.h"

namespace ep {

inline uint64_t pack(TaggedWord word) { return word.value | static_cast<uint64_t>(word.tag) << 32; }

inline std::atomic_ref<uint64_t> atomic_tagged(char* address) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(address));
}

// What another thread changes while a call waits.
struct WaitControl {
  std::atomic<double> timeout_seconds{100};
  std::atomic<bool> is_destroyed{false};
};

// The time by which all waits of a call must be over. It obeys a timeout that is changed meanwhile.
class Deadline {
  using Clock = std::chrono::steady_clock;

 public:
  enum class End { kReady, kLate, kInterrupted, kDestroyed };

  // `share`: of the timeout.
  explicit Deadline(const WaitControl& control, double share = 1)
      : control_(&control),
        share_(share),
        first_length_(length()),
        start_(Clock::now()),
        next_look_(start_ + kLookEvery) {}

  // Until `ready` is true. At any other end it was never true.
  template <class Ready>
  End wait_until(Ready ready) {
    return wait_until(ready, [this](Clock::time_point now) { return is_over(now); });
  }
  // The same; `is_late(now)` says whether the deadline has passed. Everything goes by the clock: on a machine whose
  // cores are all busy, to give the core away once may take as long as thousands of times elsewhere.
  template <class Ready, class IsLate>
  End wait_until(Ready ready, IsLate is_late) {
    if (ready()) return End::kReady;
    const Clock::time_point begin = Clock::now();
    for (Clock::time_point now = begin;; now = Clock::now()) {
      if (control_->is_destroyed.load(std::memory_order_relaxed)) return End::kDestroyed;
      if (now >= next_look_) {
        if (has_interruption()) return End::kInterrupted;
        next_look_ = Clock::now() + kLookEvery;
      }
      if (is_late(now)) return ready() ? End::kReady : End::kLate;  // it may have come while this thread had no core
      // Ranks share few cores: give the core away at once, and sleep when nothing has happened for long, the longer the
      // longer it has been.
      if (now - begin < kYieldFor) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::clamp<Clock::duration>((now - begin) / 8, kShortestSleep, kLongestSleep));
      }
      if (ready()) return End::kReady;
    }
  }

  bool is_over(Clock::time_point now) const { return now > end(); }
  // Whether it is too late to wait for a rank whose last heartbeat was at `lived_at`.
  bool is_late(Clock::time_point now, Clock::time_point lived_at) const {
    return now > end() && (now > lived_at + length() || now > end() + rounded((kMaxDeadlines - 1) * length()));
  }

  // If the timeout was changed since the call began: how long it has waited, in hundredths of a second. Else 0.
  double waited_seconds() const {
    if (length() == first_length_) return 0;
    return std::ceil(std::chrono::duration<double>(Clock::now() - start_).count() * 100) / 100;
  }

 private:
  using Seconds = std::chrono::duration<double>;
  static constexpr std::chrono::milliseconds kLookEvery{20};
  static constexpr std::chrono::microseconds kYieldFor{100}, kShortestSleep{50}, kLongestSleep{1000};

  static Clock::duration rounded(Seconds seconds) { return std::chrono::duration_cast<Clock::duration>(seconds); }
  Seconds length() const { return Seconds(share_ * control_->timeout_seconds.load(std::memory_order_relaxed)); }
  Clock::time_point end() const { return start_ + rounded(length()); }

  const WaitControl* control_;
  double share_;
  Seconds first_length_;
  Clock::time_point start_;
  Clock::time_point next_look_;  // at interruptions: over all waits of the call
};

}  // namespace ep
