// What the stresses of both modes are run with: worlds, modes, planted bugs. Config is StressConfig or HtStressConfig.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/testing.h"

namespace ep {

template <class Config>
struct StressCase {
  using Mode = typename Config::Mode;
  int num_ranks, domain_size;
  Mode mode;
  uint64_t seed;

  friend void PrintTo(const StressCase& c, std::ostream* out) {
    *out << c.num_ranks / c.domain_size << " domains of " << c.domain_size << ", mode " << static_cast<int>(c.mode)
         << ", seed " << c.seed;
  }

  // Every mode in every world (ranks, ranks of a domain).
  static std::vector<StressCase> all(const std::vector<std::pair<int, int>>& worlds, const std::vector<Mode>& modes,
                                     uint64_t first_seed) {
    std::vector<StressCase> cases;
    for (const auto& [num_ranks, domain_size] : worlds) {
      for (Mode mode : modes) cases.push_back({num_ranks, domain_size, mode, first_seed + cases.size()});
    }
    return cases;
  }

  Config config(int rounds) const {
    Config config;
    config.num_ranks = num_ranks;
    config.domain_size = domain_size;
    config.mode = mode;
    config.seed = seed;
    config.rounds = rounds;
    return config;
  }

  std::string name(const char* mode_name) const {
    return concat(num_ranks / domain_size, "x", domain_size, "_", mode_name);
  }
};

class PlantedBug {
 public:
  explicit PlantedBug(testing::Bug bug) { testing::set_bug(bug); }
  ~PlantedBug() { testing::set_bug(testing::Bug::kNone); }
};

// The same configuration passes without the bug and fails with it.
template <class Config>
void expect_found(testing::Bug bug, Config config, std::string (*run)(const Config&)) {
  EXPECT_EQ(run(config), "") << "the stress fails without the bug";
  const PlantedBug planted(bug);
  config.timeout_seconds = 1;
  config.rounds = 3000;
  const auto start = std::chrono::steady_clock::now();
  const std::string problem = run(config);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_NE(problem, "") << "the stress does not notice the bug";
  std::cout << "found in " << seconds.count() << " s:\n" << problem;
}

}  // namespace ep
