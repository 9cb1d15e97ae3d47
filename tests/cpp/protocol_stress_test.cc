// The whole protocol under delays, over shared memory and over the simulated network. Run it under ThreadSanitizer too.
#include <gtest/gtest.h>

#include "stress.h"
#include "stress_cases.h"
#include "world.h"

namespace ep {
namespace {

using Mode = StressConfig::Mode;

using Case = StressCase<StressConfig>;

class ProtocolStress : public ::testing::TestWithParam<Case> {
 protected:
  StressConfig config() const { return GetParam().config(120 / kSlowdown); }
};

TEST_P(ProtocolStress, AtFullSpeed) { EXPECT_EQ(run_stress(config()), ""); }

TEST_P(ProtocolStress, WithDelays) {
  StressConfig delayed = config();
  delayed.rounds /= 2;
  for (uint64_t seed : {1, 2}) {
    delayed.delay_seed = delayed.network_seed = GetParam().seed * 100 + seed;
    delayed.tries_second_send = seed == 1;
    EXPECT_EQ(run_stress(delayed), "") << "delay seed " << delayed.delay_seed;
  }
}

std::vector<Case> all_cases() {
  return Case::all({{1, 1}, {2, 2}, {3, 3}, {3, 1}, {4, 4}, {4, 2}, {4, 1}, {5, 5}, {5, 1}},
                   {Mode::kFused, Mode::kStaged, Mode::kPipelined, Mode::kInRow}, 11);
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kModes[] = {"fused", "staged", "pipelined", "in_row"};
  return info.param.name(kModes[static_cast<int>(info.param.mode)]);
}

INSTANTIATE_TEST_SUITE_P(Worlds, ProtocolStress, ::testing::ValuesIn(all_cases()), name_of_case);

}  // namespace
}  // namespace ep
