// The contract between the protocol and whatever moves bytes on the host. Addresses are (peer, offset in its window).
//
// What a protocol may rely on, and nothing more:
//   * peer_ptr(peer, offset) is an address for loads and stores if the peer shares this rank's LSA domain, else null.
//   * put() is asynchronous: its source must stay as it is until flush(); puts land in any order.
//   * signal_add() lands after every earlier put of this rank to the same peer. A signal has one remote writer.
//   * flush() returns when all sources may be reused. It says nothing about arrival.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "layout/common/region.h"
#include "layout/common/topology.h"

namespace ep {

// How ranks find one another before they share memory: every rank's bytes, in rank order, within the deadline. Where a
// rank is replaced, those who meet are not all ranks of the world: then these numbers are seats.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;
  virtual std::vector<std::string> allgather(std::string_view mine) = 0;
  // In the world, of the one whose bytes come at this place.
  virtual int rank_at(int seat) const { return seat; }
  int own_rank() const { return rank_at(rank()); }
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const Topology& topology() const = 0;
  virtual int rank() const = 0;
  virtual char* local_window() const = 0;
  virtual uint64_t window_bytes() const = 0;
  virtual char* peer_ptr(int peer, Offset offset) const = 0;
  virtual void put(int peer, Offset destination, const void* source, uint64_t bytes) = 0;
  virtual void signal_add(int peer, Offset signal, uint64_t value) = 0;
  virtual void flush() = 0;
  // Keeps the windows' memory for as long as it is held, the transport's end or not.
  virtual std::shared_ptr<void> window_owner() const = 0;
  // The window of `rank`, which is being made, takes the place of its old one. Collective among those who meet.
  virtual void replace(Bootstrap& bootstrap, int rank) = 0;
  // Gives up what is on its way, without waiting for peers. No call but the destructor may follow.
  virtual void abort() = 0;

  // Pairs with the release of the peer's signal_add.
  uint64_t signal(Offset offset) const {
    auto* word = reinterpret_cast<uint64_t*>(local_window() + offset);
    return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire);
  }
};

}  // namespace ep
