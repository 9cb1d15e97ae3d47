// The NICs of the emulated GPUs' network, driven by threads in the place of kernels, so that ThreadSanitizer sees what
// lies between a rank, the NICs' thread and its peer: queue, windows, signals, counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "gpu_emulator/network/nic.h"
#include "transport/collective_step.h"
#include "unit/errors.h"
#include "world.h"

namespace ep {
namespace {

constexpr uint64_t kWindowBytes = 1 << 16, kBlock = 512;
constexpr int kContexts = 2, kPuts = 6, kBanks = 2;  // puts of a round to each peer

struct World {
  int num_ranks, domain_size;
  uint64_t seed;
  friend void PrintTo(const World& w, std::ostream* out) {
    *out << w.num_ranks << " ranks in domains of " << w.domain_size << ", seed " << w.seed;
  }
};

// What cuda/network/simulated.cuh does.
void post(const SimulatedNetworkArgs& network, NicDescriptor what) {
  NicQueue& queue = *network.queue;
  const uint64_t number = std::atomic_ref(queue.num_posted).fetch_add(1, std::memory_order_relaxed);
  NicDescriptor& place = queue.descriptors[number % NicQueue::kDepth];
  ASSERT_EQ(std::atomic_ref(place.is_posted).load(std::memory_order_acquire), 0u);
  what.is_posted = 0;
  place.peer = what.peer;
  place.context = what.context;
  place.signal = what.signal;
  place.target = what.target;
  place.source = what.source;
  place.bytes = what.bytes;
  place.add = what.add;
  std::atomic_ref(place.is_posted).store(number + 1, std::memory_order_release);
}

uint64_t read_signal(const SimulatedNetworkArgs& network, int context, int signal) {
  uint64_t& word = const_cast<uint64_t&>(network.signals[context * network.num_signals + signal]);
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

void await(const SimulatedNetworkArgs& network, int context, int signal, uint64_t value) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (read_signal(network, context, signal) < value) {
    std::this_thread::yield();
    require(std::chrono::steady_clock::now() < deadline,
            concat("signal ", signal, " of context ", context, " is ", read_signal(network, context, signal), ", not ",
                   value));
  }
}

class SimulatedNic : public ::testing::TestWithParam<World> {
 protected:
  // A window: staging [bank][peer][put], then what comes [bank][source][put].
  uint64_t staged(int bank, int peer, int put) const {
    return (static_cast<uint64_t>(bank * GetParam().num_ranks + peer) * kPuts + put) * kBlock;
  }
  uint64_t landing(int bank, int source, int put) const { return kWindowBytes / 2 + staged(bank, source, put); }
  // As low latency names them: by the parity of the round, the source and the put.
  int signal_of(int bank, int source, int put) const { return (bank * GetParam().num_ranks + source) * kPuts + put; }
  static char letter(int round, int from, int to, int put) {
    return static_cast<char>(round * 37 + from * 11 + to * 5 + put);
  }

  template <class Body>
  void on_ranks(Body body) {
    const World& world = GetParam();
    std::vector<char> memory(world.num_ranks * kWindowBytes);
    NetworkConfig config;
    config.topology = Topology::make(world.num_ranks, world.domain_size);
    config.shape = {kContexts, kBanks * world.num_ranks * kPuts, kBanks * kPuts};
    config.window_bytes = config.window_stride = kWindowBytes;
    config.seed = world.seed;
    EXPECT_EQ(joined(run_ranks(world.num_ranks,
                               [&](Bootstrap& bootstrap) {
                                 const auto nics = made_by_rank_0<emulator::Nics>(bootstrap, [&] {
                                   return std::make_shared<emulator::Nics>(memory.data(), config);
                                 });
                                 std::vector<int> peers;
                                 for (int rank = 0; rank < world.num_ranks; rank++) {
                                   const Topology& topology = config.topology;
                                   const bool is_place = topology.lsa_rank(rank) == topology.lsa_rank(bootstrap.rank());
                                   if (is_place && rank != bootstrap.rank()) peers.push_back(rank);
                                 }
                                 body(bootstrap.rank(), *nics, memory.data() + bootstrap.rank() * kWindowBytes, peers);
                               })),
              "");
  }
};

// Two banks of staging and of what comes, without credits and without flush, as docs/network_protocol.md claims.
TEST_P(SimulatedNic, TwoBanksAreEnough) {
  on_ranks([&](int me, emulator::Nics& nics, char* window, const std::vector<int>& peers) {
    const SimulatedNetworkArgs network = nics.args(me);
    for (int round = 1; round <= 40 / kSlowdown; round++) {
      const int bank = round % kBanks;
      for (int peer : peers) {
        for (int put = 0; put < kPuts; put++) {
          const uint64_t source = staged(bank, peer, put), bytes = put == 0 ? 0 : kBlock - 16 * put;
          std::fill_n(window + source, kBlock, letter(round, me, peer, put));
          post(network,
               {0, peer, put % kContexts, signal_of(bank, me, put), 0, landing(bank, me, put), source, bytes, 1});
        }
      }
      for (int peer : peers) {
        for (int put = 0; put < kPuts; put++) {
          await(network, put % kContexts, signal_of(bank, peer, put), static_cast<uint64_t>(round + 1) / 2);
          if (put == 0) continue;  // a signal alone
          const char* come = window + landing(bank, peer, put);
          const char expected = letter(round, peer, me, put);
          require(std::all_of(come, come + kBlock - 16 * put, [&](char byte) { return byte == expected; }),
                  concat("put ", put, " of rank ", peer, " in round ", round));
        }
      }
    }
  });
}

// Bytes are asked for as soon as the last put was posted: long before the thread has seen it.
TEST_P(SimulatedNic, CountsWhatWasPosted) {
  on_ranks([&](int me, emulator::Nics& nics, char*, const std::vector<int>& peers) {
    const SimulatedNetworkArgs network = nics.args(me);
    uint64_t sent = 0;
    for (int round = 1; round <= 100 / kSlowdown; round++) {
      const int bank = round % kBanks;
      for (int peer : peers) {
        post(network, {0, peer, 0, signal_of(bank, me, 0), 0, landing(bank, me, 0), staged(bank, peer, 0), kBlock, 1});
        post(network, {0, peer, 1, signal_of(bank, me, 1), 0, 0, 0, 0, 1});
      }
      sent++;
      const WireBytes bytes = nics.wire_bytes(me);
      for (int peer = 0; peer < GetParam().num_ranks; peer++) {
        const bool is_peer = std::find(peers.begin(), peers.end(), peer) != peers.end();
        const uint64_t puts = is_peer ? sent : 0;
        require(bytes.network_puts[peer] == puts && bytes.network_bytes[peer] == puts * kBlock,
                concat(me, " to ", peer, " after round ", round, ": ", bytes.network_puts[peer], " puts of ",
                       bytes.network_bytes[peer], " bytes"));
      }
      for (int peer : peers) {  // no more under way than the shape allows
        await(network, 0, signal_of(bank, peer, 0), (sent + 1) / 2);
        await(network, 1, signal_of(bank, peer, 1), (sent + 1) / 2);
      }
    }
  });
}

// Ranks leave while what they have sent is under way.
TEST_P(SimulatedNic, EndsWithPutsUnderWay) {
  const auto start = std::chrono::steady_clock::now();
  on_ranks([&](int me, emulator::Nics& nics, char*, const std::vector<int>& peers) {
    for (int peer : peers) {
      for (int put = 0; put < kPuts; put++) {
        post(nics.args(me), {0, peer, put % kContexts, signal_of(0, me, put), 0, landing(0, me, put),
                             staged(0, peer, put), kBlock, 1});
      }
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

INSTANTIATE_TEST_SUITE_P(Worlds, SimulatedNic,
                         ::testing::Values(World{2, 1, 0}, World{2, 1, 7}, World{4, 2, 5}, World{3, 1, 2011}));

}  // namespace
}  // namespace ep
