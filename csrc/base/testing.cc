#include "base/testing.h"

#if defined(EP_TESTING)

#include <atomic>
#include <chrono>
#include <thread>

namespace ep::testing {
namespace {

std::atomic<int> planted_bug{0};
std::atomic<uint64_t> delay_seed{0};

uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

void set_bug(Bug bug) { planted_bug = static_cast<int>(bug); }
bool has_bug(Bug bug) { return planted_bug.load(std::memory_order_relaxed) == static_cast<int>(bug); }
void set_delays(uint64_t seed) { delay_seed = seed; }

void delay(Point point, int rank) {
  const uint64_t seed = delay_seed.load(std::memory_order_relaxed);
  if (seed == 0) return;
  thread_local uint64_t calls = 0;
  const uint64_t draw = mix(seed + ++calls * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(point) * 977 + rank);
  // About every third rank is slow: it stalls for longer than the others need for a whole call.
  const bool is_slow = mix(seed ^ static_cast<uint64_t>(rank + 1) * 0xD6E8FEB86659FD93ull) % 3 == 0;
  if (is_slow && draw % 64 == 1) {
    std::this_thread::sleep_for(std::chrono::microseconds(1000 + draw / 64 % 3000));
  } else if (draw % 8 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(draw / 8 % 400));
  } else if (draw % 8 < 3) {
    std::this_thread::yield();
  }
}

}  // namespace ep::testing

#endif
