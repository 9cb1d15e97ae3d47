// Many rounds of dispatch and combine on one group a rank, each held against the round's own expectation.
#pragma once

#include <cstdint>
#include <string>

#include "transport/transport.h"

namespace ep {

struct StressConfig {
  enum class Mode {
    kFused,      // dispatch, combine
    kStaged,     // send and receive apart
    kPipelined,  // dispatch n + 1 is in flight while combine n is
    kInRow,      // several dispatches, then their combines: no other kind of call keeps the ranks together
  };
  int num_ranks = 4;
  int domain_size = 4;
  int rounds = 100;
  Mode mode = Mode::kFused;
  uint64_t seed = 1;  // of sizes, routing and contents
  uint64_t delay_seed = 0;
  uint64_t network_seed = 0;
  double timeout_seconds = 60;
  bool same_shape = false;         // in all rounds, so that stale words look like fresh ones
  bool tries_second_send = false;  // staged: another send before the first was received must be refused
};

// What went wrong on which ranks; "" if nothing did. Ranks are threads.
std::string run_stress(const StressConfig& config);

// One rank's part. Throws at the first thing that is wrong.
void run_stress_rank(Bootstrap& bootstrap, const StressConfig& config);

// One low-latency dispatch and combine of a round on a group that has room for it.
class Group;
struct Round;
void run_ll_round(Group& group, const Round& round);

}  // namespace ep
