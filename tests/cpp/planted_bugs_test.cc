// The stress finds each planted bug: the same configuration passes without the bug and fails with it.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "base/testing.h"
#include "stress.h"
#include "stress_cases.h"
#include "world.h"

namespace ep {
namespace {

using ep::testing::Bug;
using Mode = StressConfig::Mode;

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

void expect_found(Bug bug, const StressConfig& config) { ep::expect_found(bug, config, run_stress); }

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
