// The stress finds each planted bug: the same configuration passes without the bug and fails with it.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "base/testing.h"
#include "stress.h"
#include "world.h"

namespace ep {
namespace {

using ep::testing::Bug;
using Mode = StressConfig::Mode;

class PlantedBug {
 public:
  explicit PlantedBug(Bug bug) { testing::set_bug(bug); }
  ~PlantedBug() { testing::set_bug(Bug::kNone); }
};

// Delays long and often enough that a fast rank overtakes a slow one many times. A round hits on the bug or not by
// timing, hence many rounds; the first hit ends the run.
StressConfig config_for(int domain_size, Mode mode) {
  StressConfig config;
  config.domain_size = domain_size;
  config.mode = mode;
  config.same_shape = true;
  config.rounds = 60;
  config.delay_seed = 7;
  config.network_seed = 7;
  return config;
}

void expect_found(Bug bug, StressConfig config) {
  EXPECT_EQ(run_stress(config), "") << "the stress fails without the bug";
  const PlantedBug planted(bug);
  config.timeout_seconds = 1;
  config.rounds = 3000;
  const auto start = std::chrono::steady_clock::now();
  const std::string problem = run_stress(config);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_NE(problem, "") << "the stress does not notice the bug";
  std::cout << "found in " << seconds.count() << " s:\n" << problem;
}

TEST(PlantedBugs, OneBank) { expect_found(Bug::kOneBank, config_for(4, Mode::kInRow)); }
TEST(PlantedBugs, SkippedReset) { expect_found(Bug::kSkippedReset, config_for(4, Mode::kFused)); }
TEST(PlantedBugs, ReusedEpoch) { expect_found(Bug::kReusedEpoch, config_for(4, Mode::kFused)); }

TEST(PlantedBugs, OneBankOverTheNetwork) {
  if (kHasTsan) GTEST_SKIP() << "the bug is a data race, which ends the process";
  expect_found(Bug::kOneBank, config_for(1, Mode::kPipelined));
}

TEST(PlantedBugs, ReusedEpochOverTheNetwork) {
  if (kHasTsan) GTEST_SKIP() << "the bug is a data race, which ends the process";
  expect_found(Bug::kReusedEpoch, config_for(1, Mode::kStaged));
}

TEST(PlantedBugs, SignalBeforeData) {
  if (kHasTsan) GTEST_SKIP() << "the bug is a data race, which ends the process";
  expect_found(Bug::kSignalBeforeData, config_for(1, Mode::kFused));
}

TEST(PlantedBugs, SecondSend) {
  StressConfig config = config_for(4, Mode::kStaged);
  config.tries_second_send = true;
  expect_found(Bug::kSecondSend, config);
}

}  // namespace
}  // namespace ep
