// Random numbers of the fuzz of the C library: small ones mostly, and those at which arithmetic ends.
#pragma once

#include <cstdint>
#include <iterator>
#include <random>

namespace ep::fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t within(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  bool one_in(int count) { return within(1, count) == 1; }
  template <class T, size_t N>
  T pick(const T (&values)[N]) {
    return values[within(0, N - 1)];
  }
  // What no valid call has, or hardly any.
  int64_t odd() {
    constexpr int64_t kOdd[] = {-1,
                                0,
                                1,
                                2,
                                3,
                                7,
                                1 << 20,
                                INT32_MAX,
                                INT32_MIN,
                                INT64_MAX,
                                INT64_MIN,
                                INT64_MAX - 1,
                                1ll << 32,
                                -2,
                                65536,
                                65537,
                                INT64_MAX / 2,
                                1ll << 62};
    return pick(kOdd);
  }
  // `value`, or seldom an odd one.
  int64_t mostly(int64_t value, int seldom = 40) { return one_in(seldom) ? odd() : value; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace ep::fuzz
