// High throughput under delays, over shared memory and over the simulated network, and the bugs that it must notice.
// Run it under ThreadSanitizer too.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "base/testing.h"
#include "ht_stress.h"
#include "stress_cases.h"
#include "world.h"

namespace ep {
namespace {

using ep::testing::Bug;
using Mode = HtStressConfig::Mode;

using Case = StressCase<HtStressConfig>;

class HtProtocol : public ::testing::TestWithParam<Case> {
 protected:
  HtStressConfig config() const { return GetParam().config(80 / kSlowdown); }
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

std::vector<Case> all_cases() {
  return Case::all({{1, 1}, {2, 2}, {3, 1}, {4, 4}, {4, 2}, {4, 1}, {5, 5}, {6, 2}, {6, 3}},
                   {Mode::kPairs, Mode::kCached, Mode::kInRow, Mode::kMixed}, 31);
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kModes[] = {"pairs", "cached", "in_row", "mixed"};
  return info.param.name(kModes[static_cast<int>(info.param.mode)]);
}

INSTANTIATE_TEST_SUITE_P(Worlds, HtProtocol, ::testing::ValuesIn(all_cases()), name_of_case);

// ---- Planted bugs: the same configuration passes without the bug and fails with it.

void expect_found(Bug bug, int domain_size, Mode mode, uint64_t seed = 1) {
  if (kHasTsan) GTEST_SKIP() << "the bug is a data race, which ends the process";
  HtStressConfig config;
  config.domain_size = domain_size;
  config.mode = mode;
  config.seed = seed;
  config.same_shape = true;
  config.delay_seed = config.network_seed = 7;
  ep::expect_found(bug, config, run_ht_stress);
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
