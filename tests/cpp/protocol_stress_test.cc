// The whole protocol under delays, over shared memory and over the simulated network. Run it under ThreadSanitizer too.
#include <gtest/gtest.h>

#include "stress.h"
#include "world.h"

namespace ep {
namespace {

using Mode = StressConfig::Mode;

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
  constexpr int kWorlds[][2] = {{1, 1}, {2, 2}, {3, 3}, {3, 1}, {4, 4}, {4, 2}, {4, 1}, {5, 5}, {5, 1}};
  std::vector<Case> cases;
  for (const auto& world : kWorlds) {
    for (Mode mode : {Mode::kFused, Mode::kStaged, Mode::kPipelined, Mode::kInRow}) {
      cases.push_back({world[0], world[1], mode, 11 + cases.size()});
    }
  }
  return cases;
}

class ProtocolStress : public ::testing::TestWithParam<Case> {
 protected:
  StressConfig config() const {
    const Case& c = GetParam();
    StressConfig config;
    config.num_ranks = c.num_ranks;
    config.domain_size = c.domain_size;
    config.mode = c.mode;
    config.seed = c.seed;
    config.rounds = 120 / kSlowdown;
    return config;
  }
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

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kModes[] = {"fused", "staged", "pipelined", "in_row"};
  const Case& c = info.param;
  return concat(c.num_ranks / c.domain_size, "x", c.domain_size, "_", kModes[static_cast<int>(c.mode)]);
}

INSTANTIATE_TEST_SUITE_P(Worlds, ProtocolStress, ::testing::ValuesIn(all_cases()), name_of_case);

}  // namespace
}  // namespace ep
