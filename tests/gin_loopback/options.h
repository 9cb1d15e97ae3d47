// The environment of the plugin: what it does on purpose that a real network may do, and failures.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

namespace gin_loopback {

inline long environment(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtol(text, nullptr, 0) : otherwise;
}

struct Options {
  uint64_t delay_ns = 0;         // every request waits a random time up to this
  bool reorders = false;         // requests pass one another; a strong signal passes nothing
  bool completes_early = false;  // the sender is told "done" when its data was read, before it lands
  long fails_after = 0;          // n: posting the n-th request fails
  long stalls_after = -1;        // n: nothing lands any more after n requests, and nobody is told
  double connect_stall_s = 0;    // connect() does nothing for so long, and fails
  long faulty_rank = -1;         // the one rank to which the three lines above apply; -1: all
  uint64_t seed = 1;
  double timeout_s = 60;   // of a message between the ranks
  int max_recvs = 8;       // NCCL's queue of a context and peer has 32 times as many places
  std::string statistics;  // a file, to which each rank appends a line of JSON

  static Options read() {
    Options options;
    options.delay_ns = static_cast<uint64_t>(environment("GIN_LOOPBACK_DELAY_US", 0)) * 1000;
    options.reorders = environment("GIN_LOOPBACK_REORDER", 0) != 0;
    options.completes_early = environment("GIN_LOOPBACK_EARLY", 0) != 0;
    options.fails_after = environment("GIN_LOOPBACK_FAIL_AFTER", 0);
    options.stalls_after = environment("GIN_LOOPBACK_STALL_AFTER", -1);
    options.connect_stall_s = static_cast<double>(environment("GIN_LOOPBACK_CONNECT_STALL_S", 0));
    options.faulty_rank = environment("GIN_LOOPBACK_FAULTY_RANK", -1);
    options.seed = static_cast<uint64_t>(environment("GIN_LOOPBACK_SEED", 1));
    options.timeout_s = static_cast<double>(environment("GIN_LOOPBACK_TIMEOUT_S", 60));
    options.max_recvs = static_cast<int>(environment("GIN_LOOPBACK_MAX_RECVS", 8));
    if (const char* file = std::getenv("GIN_LOOPBACK_STATISTICS")) options.statistics = file;
    return options;
  }
  bool is_faulty(int rank) const { return faulty_rank < 0 || faulty_rank == rank; }
  bool disturbs_order() const { return delay_ns != 0 || reorders || completes_early; }
};

}  // namespace gin_loopback
