// The NICs of all ranks of a simulated network: a thread that takes descriptors from their queues and lets them land as
// csrc/cuda/network/network.h allows. Puts land in pieces, in any order; the source is read when a piece lands; a
// signal lands after its own put and knows no other.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cuda/host/network_path.h"
#include "cuda/network/simulated.h"

namespace ep::emulator {

class Nics {
 public:
  // `first_window`: of rank 0; the others follow at `config.window_stride`.
  Nics(char* first_window, const NetworkConfig& config);
  ~Nics();
  Nics(const Nics&) = delete;
  Nics& operator=(const Nics&) = delete;

  SimulatedNetworkArgs args(int rank);
  // Of all that the rank's kernels have posted. Waits until the thread has seen it: a kernel may have ended before.
  // Raises what no operation shows: that one has ended before all that was sent to it was there.
  WireBytes wire_bytes(int rank) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Piece {
    uint64_t offset, bytes;  // in the put
  };
  struct Item {
    int rank;
    NicDescriptor what;
    std::vector<Piece> pieces;  // that have not landed
    Clock::time_point not_before;
  };
  struct Counts {
    uint64_t num_taken = 0;
    WireBytes bytes;
  };

  void run();
  bool take(int rank);
  void count(int rank, const NicDescriptor& what);
  void cut(Item& item);
  Clock::duration lateness(int rank);
  void land_any();
  void land_signal(const NicDescriptor& what);
  unsigned below(size_t n) { return static_cast<unsigned>(random_() % n); }

  char* const first_window_;
  const NetworkConfig config_;
  const int num_ranks_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<NicQueue>> queues_;
  std::vector<std::vector<uint64_t>> signals_;  // of each rank [context][signal]
  std::vector<uint64_t> num_taken_;
  std::vector<Item> items_;
  std::vector<std::atomic<bool>> leaves_some_;
  mutable std::mutex mutex_;  // of the counts
  mutable std::condition_variable has_counted_;
  std::vector<Counts> counts_;
  std::atomic<bool> is_stopping_{false};
  std::thread thread_;
};

}  // namespace ep::emulator
