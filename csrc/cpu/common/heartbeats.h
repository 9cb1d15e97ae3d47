// Heartbeats (layout/common/wire.h) of ranks on the host, which share memory.
#pragma once

#include <chrono>
#include <vector>

#include "cpu/common/wait.h"
#include "layout/window.h"
#include "transport/transport.h"

namespace ep {

class Heartbeats {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Called by a wait: now and then sends a heartbeat to all ranks, and notes theirs.
  void exchange(Transport& transport, Offset heartbeats_at, Time now, double timeout_seconds) {
    if (now < given_at_ + std::chrono::duration<double>(timeout_seconds / kHeartbeatsPerDeadline)) return;
    given_at_ = now;
    own_++;
    const auto num_ranks = static_cast<size_t>(transport.topology().num_ranks);
    seen_.resize(num_ranks);
    seen_at_.resize(num_ranks);
    const auto heartbeat_of = [&](int rank, int source) {
      return atomic_tagged(transport.peer_ptr(rank, heartbeats_at + source * sizeof(uint64_t)));
    };
    for (int rank = 0; rank < transport.topology().num_ranks; rank++) {
      heartbeat_of(rank, transport.rank()).store(own_, std::memory_order_relaxed);
      const uint64_t sign = heartbeat_of(transport.rank(), rank).load(std::memory_order_relaxed);
      if (sign != seen_[rank]) seen_at_[rank] = now;
      seen_[rank] = sign;
    }
  }

  // When the last heartbeat of `rank` was seen here.
  Time last_of(int rank) const { return static_cast<size_t>(rank) < seen_at_.size() ? seen_at_[rank] : Time{}; }

 private:
  Time given_at_{};
  uint64_t own_ = 0;
  std::vector<uint64_t> seen_;
  std::vector<Time> seen_at_;
};

}  // namespace ep
