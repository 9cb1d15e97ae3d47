// Many rounds of high-throughput dispatch and combine on one group a rank, each held against the round's own
// expectation.
#pragma once

#include <cstdint>
#include <string>

#include "transport/transport.h"

namespace ep {

struct HtStressConfig {
  enum class Mode {
    kPairs,   // dispatch, combine
    kCached,  // dispatch, twice the same rows along its handle, combine
    kInRow,   // several dispatches, whose outputs all live, then their combines
    kMixed,   // beside each pair a low-latency one on the same buffer
  };
  int num_ranks = 4;
  int domain_size = 4;
  int rounds = 60;
  Mode mode = Mode::kPairs;
  uint64_t seed = 1;
  uint64_t delay_seed = 0;
  uint64_t network_seed = 0;
  double timeout_seconds = 60;
  bool same_shape = false;  // in all rounds, so that stale words look like fresh ones
};

// What went wrong on which ranks; "" if nothing did. Ranks are threads.
std::string run_ht_stress(const HtStressConfig& config);

// One rank's part. Throws at the first thing that is wrong.
void run_ht_stress_rank(Bootstrap& bootstrap, const HtStressConfig& config);

}  // namespace ep
