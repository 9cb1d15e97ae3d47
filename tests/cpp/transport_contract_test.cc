// What transport.h promises, asked of every host transport in the same words.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>

#include "transport/host/transport.h"
#include "unit/errors.h"
#include "world.h"

namespace ep {
namespace {

struct Network {
  int num_ranks, domain_size;
  uint64_t seed;
  friend void PrintTo(const Network& n, std::ostream* out) {
    *out << n.num_ranks << " ranks in domains of " << n.domain_size << ", seed " << n.seed;
  }
};

constexpr uint64_t kWindowBytes = 65536;
constexpr Offset kData = 4096;  // signals lie below

void await(const Transport& transport, Offset signal, uint64_t value) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (transport.signal(signal) < value) {
    std::this_thread::yield();
    require(std::chrono::steady_clock::now() < deadline,
            concat("signal ", signal, " is ", transport.signal(signal), ", expected ", value));
  }
}

class TransportContract : public ::testing::TestWithParam<Network> {
 protected:
  // Every rank runs `body` with a transport of its own; windows are zero at first.
  template <class Body>
  void on_ranks(Body body) {
    const Network& network = GetParam();
    EXPECT_EQ(joined(run_ranks(network.num_ranks,
                               [&](Bootstrap& bootstrap) {
                                 auto windows = HostWindows::create(bootstrap, kWindowBytes);
                                 std::memset(windows->base(windows->rank()), 0, kWindowBytes);
                                 bootstrap.allgather("clean");
                                 const uint64_t seed = network.seed == 0 ? 0 : network.seed + bootstrap.rank();
                                 auto transport = make_host_transport(
                                     std::move(windows), Topology::make(network.num_ranks, network.domain_size), seed);
                                 body(bootstrap, transport);
                               })),
              "");
  }
  static Offset signal_of(int source) { return static_cast<Offset>(source) * 8; }
  static Offset block_of(int source, int index) { return kData + (static_cast<Offset>(source) * 16 + index) * 256; }
};

TEST_P(TransportContract, KnowsItsRankAndWindow) {
  on_ranks([&](Bootstrap& bootstrap, std::unique_ptr<Transport>& transport) {
    require(transport->rank() == bootstrap.rank(), "rank");
    require(transport->window_bytes() == kWindowBytes, "bytes");
    require(transport->topology().domain_size == GetParam().domain_size, "topology");
    require(reinterpret_cast<uintptr_t>(transport->local_window()) % 4096 == 0, "alignment");
  });
}

TEST_P(TransportContract, PeerPtrReachesTheOwnDomainOnly) {
  on_ranks([&](Bootstrap& bootstrap, std::unique_ptr<Transport>& transport) {
    const int me = bootstrap.rank();
    for (int peer = 0; peer < bootstrap.num_ranks(); peer++) {
      char* address = transport->peer_ptr(peer, block_of(me, 0));
      require((address != nullptr) == transport->topology().is_lsa(me, peer), concat("peer_ptr of ", peer));
      if (address != nullptr) *address = static_cast<char>(100 + me);
    }
    require(transport->peer_ptr(me, 64) == transport->local_window() + 64, "the own window");
    bootstrap.allgather("written");
    for (int peer = 0; peer < bootstrap.num_ranks(); peer++) {
      const int expected = transport->topology().is_lsa(me, peer) ? 100 + peer : 0;
      require(transport->local_window()[block_of(peer, 0)] == expected, concat("store of ", peer));
    }
  });
}

// Sources are overwritten as soon as flush() returns; a signal promises every put before it.
TEST_P(TransportContract, SignalsFollowTheirPuts) {
  on_ranks([&](Bootstrap& bootstrap, std::unique_ptr<Transport>& transport) {
    const int me = bootstrap.rank(), num_ranks = bootstrap.num_ranks();
    for (int round = 1; round <= 60 / kSlowdown; round++) {
      char sources[16][256];
      for (int i = 0; i < 16; i++) std::memset(sources[i], round * 31 + me * 7 + i, sizeof sources[i]);
      for (int peer = 0; peer < num_ranks; peer++) {
        for (int i = 0; i < 16; i++) {
          if (round % 2 == 0 && i == 8) transport->signal_add(peer, signal_of(me), 1);
          transport->put(peer, block_of(me, i), sources[i], 1 + (round * 37 + i * 11) % 256);
        }
        transport->signal_add(peer, signal_of(me), round % 2 == 0 ? 1 : 2);
      }
      transport->flush();
      std::memset(sources, 0xEE, sizeof sources);
      for (int source = 0; source < num_ranks; source++) {
        await(*transport, signal_of(source), 2 * round);
        for (int i = 0; i < 16; i++) {
          const char* block = transport->local_window() + block_of(source, i);
          const char expected = static_cast<char>(round * 31 + source * 7 + i);
          const int bytes = 1 + (round * 37 + i * 11) % 256;
          require(std::all_of(block, block + bytes, [&](char byte) { return byte == expected; }),
                  concat("block ", i, " of rank ", source, " in round ", round));
        }
      }
      bootstrap.allgather("read");  // as two banks do in the protocol
    }
  });
}

// The first half of the puts is promised by the first signal, whatever comes after it.
TEST_P(TransportContract, EverySignalPromisesThePutsBeforeIt) {
  on_ranks([&](Bootstrap& bootstrap, std::unique_ptr<Transport>& transport) {
    const int me = bootstrap.rank(), num_ranks = bootstrap.num_ranks();
    std::vector<uint64_t> values(16);
    for (int i = 0; i < 16; i++) values[i] = 1000 + i;
    for (int peer = 0; peer < num_ranks; peer++) {
      for (int i = 0; i < 16; i++) {
        transport->put(peer, block_of(me, i), &values[i], 8);
        transport->signal_add(peer, signal_of(me), 1);
      }
    }
    for (int source = 0; source < num_ranks; source++) {
      for (uint64_t i = 0; i < 16; i++) {
        await(*transport, signal_of(source), i + 1);
        uint64_t value;
        std::memcpy(&value, transport->local_window() + block_of(source, static_cast<int>(i)), 8);
        require(value == 1000 + i, concat("put ", i, " of rank ", source, " has not landed with its signal"));
      }
    }
    transport->flush();
  });
}

TEST_P(TransportContract, SignalsAddUp) {
  on_ranks([&](Bootstrap& bootstrap, std::unique_ptr<Transport>& transport) {
    for (int i = 1; i <= 100; i++) {
      for (int peer = 0; peer < bootstrap.num_ranks(); peer++) {
        transport->signal_add(peer, signal_of(bootstrap.rank()), i);
      }
    }
    for (int source = 0; source < bootstrap.num_ranks(); source++) await(*transport, signal_of(source), 5050);
    bootstrap.allgather("all signals are there");
    for (int source = 0; source < bootstrap.num_ranks(); source++) {
      require(transport->signal(signal_of(source)) == 5050, concat("signal of ", source));
    }
  });
}

TEST_P(TransportContract, RefusesWhatLeavesTheWindow) {
  on_ranks([&](Bootstrap& bootstrap, std::unique_ptr<Transport>& transport) {
    const char bytes[16] = {1, 2, 3};
    for (int peer = 0; peer < bootstrap.num_ranks(); peer++) {
      for (Offset offset : {kWindowBytes - 15, kWindowBytes, kWindowBytes * 2, ~Offset{0}, ~Offset{0} - 7}) {
        const std::string error = error_of([&] { transport->put(peer, offset, bytes, 16); });
        require(
            error == concat("a put of 16 bytes to offset ", offset, " of rank ", peer, " leaves its window of 65536"),
            "not refused: " + error);
      }
      require(error_of([&] { transport->put(peer, 8, bytes, ~uint64_t{0}); }) != "", "a huge put");
      require(error_of([&] { transport->signal_add(peer, kWindowBytes - 7, 1); }) != "", "a signal past the end");
      const bool is_next = peer == (bootstrap.rank() + 1) % bootstrap.num_ranks();  // each window has one writer
      require(!is_next || error_of([&] { transport->put(peer, kWindowBytes - 16, bytes, 16); }) == "",
              "the last bytes");
      require(error_of([&] { transport->put(peer, kWindowBytes, bytes, 0); }) == "", "nothing");
    }
    for (int peer : {-1, bootstrap.num_ranks()}) {
      const std::string error = error_of([&] { transport->put(peer, 0, bytes, 16); });
      require(error == concat("a put to rank ", peer, " of ", bootstrap.num_ranks()), "not refused: " + error);
    }
    transport->flush();
    // What was refused has left no trace, and the transport works on.
    for (int peer = 0; peer < bootstrap.num_ranks(); peer++)
      transport->signal_add(peer, signal_of(bootstrap.rank()), 1);
    for (int source = 0; source < bootstrap.num_ranks(); source++) await(*transport, signal_of(source), 1);
    bootstrap.allgather("done");
  });
}

TEST_P(TransportContract, WhatIsOnItsWayArrivesThoughTheSenderLeaves) {
  on_ranks([&](Bootstrap& bootstrap, std::unique_ptr<Transport>& transport) {
    const int me = bootstrap.rank(), num_ranks = bootstrap.num_ranks();
    if (me == 0) {
      std::vector<char> source(256, 'x');
      for (int peer = 1; peer < num_ranks; peer++) {
        for (int i = 0; i < 16; i++) transport->put(peer, block_of(0, i), source.data(), 256);
        transport->signal_add(peer, signal_of(0), 1);
      }
      transport->flush();
      source.assign(256, 'y');
      transport.reset();
      return;
    }
    await(*transport, signal_of(0), 1);
    for (int i = 0; i < 16 * 256; i++) {
      require(transport->local_window()[block_of(0, 0) + i] == 'x', concat("byte ", i));
    }
  });
}

TEST_P(TransportContract, AbortWaitsForNobody) {
  on_ranks([&](Bootstrap& bootstrap, std::unique_ptr<Transport>& transport) {
    std::vector<char> source(256, 'x');
    for (int i = 0; i < 1000; i++) {
      for (int peer = 0; peer < bootstrap.num_ranks(); peer++) {
        transport->put(peer, block_of(bootstrap.rank(), i % 16), source.data(), 256);
      }
    }
    transport->abort();
    source = {};  // nothing reads it any more
    transport.reset();
  });
}

INSTANTIATE_TEST_SUITE_P(Heap, TransportContract, ::testing::Values(Network{1, 1, 0}, Network{3, 3, 0}));
INSTANTIATE_TEST_SUITE_P(NetworkInOrder, TransportContract, ::testing::Values(Network{3, 1, 0}, Network{4, 2, 0}));
INSTANTIATE_TEST_SUITE_P(Network, TransportContract,
                         ::testing::Values(Network{2, 1, 1}, Network{3, 1, 2}, Network{4, 1, 3}, Network{4, 2, 4},
                                           Network{6, 3, 5}));

// A simulation that kept the order would not test anything.
TEST(SimulatedNetwork, ReordersPutsAsTheSeedSays) {
  const auto last_of = [](uint64_t seed) {
    std::vector<uint64_t> last(40);
    const std::string problems = joined(run_ranks(2, [&](Bootstrap& bootstrap) {
      auto windows = HostWindows::create(bootstrap, kWindowBytes);
      std::memset(windows->base(windows->rank()), 0, kWindowBytes);
      bootstrap.allgather("clean");
      const auto transport = make_host_transport(std::move(windows), Topology::make(2, 1), seed);
      std::vector<uint64_t> values(32);
      for (size_t i = 0; i < values.size(); i++) values[i] = i;
      for (size_t trial = 0; trial < last.size(); trial++) {
        if (bootstrap.rank() == 0) {
          for (const uint64_t& value : values) transport->put(1, kData + trial * 8, &value, 8);
          transport->signal_add(1, 0, 1);
          transport->flush();
        } else {
          await(*transport, 0, trial + 1);
          std::memcpy(&last[trial], transport->local_window() + kData + trial * 8, 8);
        }
      }
      bootstrap.allgather("done");
    }));
    EXPECT_EQ(problems, "");
    return std::count_if(last.begin(), last.end(), [](uint64_t value) { return value != 31; });
  };
  EXPECT_EQ(last_of(0), 0);
  EXPECT_GT(last_of(1), 3);
}

}  // namespace
}  // namespace ep
