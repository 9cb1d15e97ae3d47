// High throughput under delays, over shared memory and over the simulated network, and the bugs that it must notice.
// Run it under ThreadSanitizer too.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "base/testing.h"
#include "ht_stress.h"
#include "world.h"

namespace ep {
namespace {

using ep::testing::Bug;
using Mode = HtStressConfig::Mode;

struct Case {
  int num_ranks, domain_size;
  Mode mode;
  uint64_t seed;
  friend void PrintTo(const Case& c, std::ostream* out) {
    *out << c.num_ranks / c.domain_size << " domains of " << c.domain_size << ", mode " << static_cast<int>(c.mode)
         << ", seed " << c.seed;
  }
};

std::vector<Case> all_cases() {
  constexpr int kWorlds[][2] = {{1, 1}, {2, 2}, {3, 1}, {4, 4}, {4, 2}, {4, 1}, {5, 5}, {6, 2}, {6, 3}};
  std::vector<Case> cases;
  for (const auto& world : kWorlds) {
    for (Mode mode : {Mode::kPairs, Mode::kCached, Mode::kInRow, Mode::kMixed}) {
      cases.push_back({world[0], world[1], mode, 31 + cases.size()});
    }
  }
  return cases;
}

class HtProtocol : public ::testing::TestWithParam<Case> {
 protected:
  HtStressConfig config() const {
    const Case& c = GetParam();
    HtStressConfig config;
    config.num_ranks = c.num_ranks;
    config.domain_size = c.domain_size;
    config.mode = c.mode;
    config.seed = c.seed;
    config.rounds = 80 / kSlowdown;
    return config;
  }
};

TEST_P(HtProtocol, AtFullSpeed) { EXPECT_EQ(run_ht_stress(config()), ""); }

TEST_P(HtProtocol, WithDelays) {
  HtStressConfig delayed = config();
  delayed.rounds /= 2;
  for (uint64_t seed : {1, 2}) {
    delayed.delay_seed = delayed.network_seed = GetParam().seed * 100 + seed;
    EXPECT_EQ(run_ht_stress(delayed), "") << "delay seed " << delayed.delay_seed;
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kModes[] = {"pairs", "cached", "in_row", "mixed"};
  const Case& c = info.param;
  return concat(c.num_ranks / c.domain_size, "x", c.domain_size, "_", kModes[static_cast<int>(c.mode)]);
}

INSTANTIATE_TEST_SUITE_P(Worlds, HtProtocol, ::testing::ValuesIn(all_cases()), name_of_case);

// ---- Planted bugs: the same configuration passes without the bug and fails with it.

class PlantedBug {
 public:
  explicit PlantedBug(Bug bug) { testing::set_bug(bug); }
  ~PlantedBug() { testing::set_bug(Bug::kNone); }
};

void expect_found(Bug bug, int domain_size, Mode mode, uint64_t seed = 1) {
  if (kHasTsan) GTEST_SKIP() << "the bug is a data race, which ends the process";
  HtStressConfig config;
  config.domain_size = domain_size;
  config.mode = mode;
  config.seed = seed;
  config.same_shape = true;
  config.delay_seed = config.network_seed = 7;
  EXPECT_EQ(run_ht_stress(config), "") << "the stress fails without the bug";
  const PlantedBug planted(bug);
  config.timeout_seconds = 1;
  config.rounds = 3000;
  const auto start = std::chrono::steady_clock::now();
  const std::string problem = run_ht_stress(config);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_NE(problem, "") << "the stress does not notice the bug";
  std::cout << "found in " << seconds.count() << " s:\n" << problem;
}

TEST(HtPlantedBugs, EarlyDone) { expect_found(Bug::kEarlyDone, 4, Mode::kPairs); }
TEST(HtPlantedBugs, EarlyRows) { expect_found(Bug::kEarlyRows, 4, Mode::kCached); }
TEST(HtPlantedBugs, EarlyRowsInDomains) { expect_found(Bug::kEarlyRows, 2, Mode::kPairs); }
TEST(HtPlantedBugs, ReusedEpoch) { expect_found(Bug::kReusedEpoch, 4, Mode::kPairs); }
TEST(HtPlantedBugs, ReusedEpochOverTheNetwork) { expect_found(Bug::kReusedEpoch, 1, Mode::kPairs); }
TEST(HtPlantedBugs, SignalBeforeData) { expect_found(Bug::kSignalBeforeData, 1, Mode::kPairs); }
// Only the routing step of exact sizes (flat, here by the seed) needs two banks: the signals of every other operation
// prove that all ranks have read its calls.
TEST(HtPlantedBugs, OneBank) { expect_found(Bug::kOneBank, 4, Mode::kInRow, 3); }

}  // namespace
}  // namespace ep
