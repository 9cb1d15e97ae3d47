// Times of a GPU on the host's clock, while the two drift apart.
#include "runtime/gpu_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

namespace ep {
namespace {

constexpr int64_t kMs = 1000 * 1000, kSecond = 1000 * kMs;

// Counts from a time of its own, and 50 us a second too fast.
struct Gpu {
  int64_t host_ns = 5 * kSecond;
  std::mt19937 random{1};

  uint64_t now() const { return static_cast<uint64_t>(1'700'000'000 * kSecond + host_ns + host_ns / 20'000); }
  // What the GPU writes is seen 3 to 30 us later.
  void look(GpuClock& clock) {
    clock.begin_look(host_ns);
    for (int i = 0; i < 3; i++) {
      const uint64_t written = now();
      host_ns += 3'000 + static_cast<int64_t>(random() % 27'000);
      clock.add(written, host_ns);
    }
    clock.end_look();
  }
};

TEST(GpuClock, FollowsTheHostForAnHour) {
  Gpu gpu;
  GpuClock clock;
  gpu.look(clock);
  int64_t worst_ns = 0;
  for (; gpu.host_ns < 3'600 * kSecond; gpu.host_ns += 300 * kMs) {
    if (clock.is_due(gpu.host_ns)) gpu.look(clock);
    worst_ns = std::max(worst_ns, std::abs(clock.on_host(gpu.now()) - gpu.host_ns));
  }
  EXPECT_LT(worst_ns, 100'000);
}

TEST(GpuClock, TheNearestOfALookCounts) {
  GpuClock clock;
  clock.begin_look(0);
  clock.add(1000, 5'000);
  clock.add(2000, 2'300);
  clock.add(3000, 9'000);
  clock.end_look();
  EXPECT_EQ(clock.on_host(4000), 4'300);
}

TEST(GpuClock, ALookWithoutAnEndChangesNothing) {
  GpuClock clock;
  clock.begin_look(0);
  clock.add(1000, 1'500);
  clock.end_look();
  EXPECT_FALSE(clock.is_due(GpuClock::kEveryNs - 1));
  EXPECT_TRUE(clock.is_due(GpuClock::kEveryNs));
  clock.begin_look(GpuClock::kEveryNs);
  clock.add(2000, 90'000);
  EXPECT_EQ(clock.on_host(4000), 4'500);
  EXPECT_FALSE(clock.is_due(GpuClock::kEveryNs + 1));
}

}  // namespace
}  // namespace ep
