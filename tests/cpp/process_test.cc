// Ranks that are processes: windows in memfd, and the whole protocol over them.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <new>

#include "ht_stress.h"
#include "stress.h"
#include "transport/host/window.h"
#include "world.h"

namespace ep {
namespace {

// Memory that forked processes share: each meeting has a slot a rank.
struct Shared {
  static constexpr int kRanks = 4, kMeetings = 32, kBytes = 1000;
  struct Slot {
    std::atomic<int> size;  // -1: not there yet; set with release after the bytes
    char bytes[kBytes];
  } slots[kMeetings][kRanks];
  std::atomic<int> flags[kRanks];
};

class ProcessBootstrap : public Bootstrap {
 public:
  ProcessBootstrap(Shared& shared, int rank, int num_ranks) : shared_(shared), rank_(rank), num_ranks_(num_ranks) {}
  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  std::vector<std::string> allgather(std::string_view mine) override {
    if (mine.size() > Shared::kBytes || meeting_ == Shared::kMeetings) throw std::runtime_error("meeting too large");
    Shared::Slot& slot = shared_.slots[meeting_][rank_];
    std::memcpy(slot.bytes, mine.data(), mine.size());
    slot.size.store(static_cast<int>(mine.size()), std::memory_order_release);
    std::vector<std::string> all;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    for (int r = 0; r < num_ranks_; r++) {
      Shared::Slot& theirs = shared_.slots[meeting_][r];
      while (theirs.size.load(std::memory_order_acquire) < 0) {
        std::this_thread::yield();
        if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error(concat("no word from rank ", r));
      }
      all.emplace_back(theirs.bytes, theirs.size.load());
    }
    meeting_++;
    return all;
  }

 private:
  Shared& shared_;
  const int rank_, num_ranks_;
  int meeting_ = 0;
};

// How each rank's process ended: 0 if well.
template <class Body>
std::vector<int> run_processes(int num_ranks, Body body) {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* shared = new (memory) Shared;
  for (auto& meeting : shared->slots) {
    for (Shared::Slot& slot : meeting) slot.size = -1;
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < num_ranks; rank++) {
    const pid_t child = fork();
    if (child == 0) {
      int status = 1;
      try {
        ProcessBootstrap bootstrap(*shared, rank, num_ranks);
        body(bootstrap, *shared);
        status = 0;
      } catch (const std::exception& error) {
        std::cerr << "rank " << rank << ": " << error.what() << std::endl;
      }
      _exit(status);  // the test framework belongs to the parent
    }
    children.push_back(child);
  }
  std::vector<int> statuses;
  for (pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    statuses.push_back(status);
  }
  munmap(memory, sizeof(Shared));
  return statuses;
}

TEST(Processes, WindowsAreShared) {
  const auto statuses = run_processes(3, [](Bootstrap& bootstrap, Shared&) {
    const int me = bootstrap.rank();
    const auto windows = HostWindows::create(bootstrap, 8192);
    for (int i = 0; i < 8192; i++) {
      if (windows->base(me)[i] != 0) throw std::runtime_error("a new memfd is not zero");
    }
    bootstrap.allgather("looked");
    for (int peer = 0; peer < 3; peer++) windows->base(peer)[4096 + me] = static_cast<char>(10 * peer + me);
    bootstrap.allgather("written");
    for (int source = 0; source < 3; source++) {
      if (windows->base(me)[4096 + source] != 10 * me + source) throw std::runtime_error("a store did not arrive");
    }
    bootstrap.allgather("read");
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
}

// The windows go with the last process that maps them, not with their owner.
TEST(Processes, AWindowOutlivesItsOwner) {
  const auto statuses = run_processes(2, [](Bootstrap& bootstrap, Shared& shared) {
    auto windows = HostWindows::create(bootstrap, 4096);
    if (bootstrap.rank() == 0) {
      std::memset(windows->base(0), 'z', 4096);
      windows.reset();
      shared.flags[0].store(1, std::memory_order_release);
      return;
    }
    while (shared.flags[0].load(std::memory_order_acquire) == 0) std::this_thread::yield();
    std::memset(windows->base(0), 'y', 2048);  // a late store must not crash
    if (windows->base(0)[4095] != 'z') throw std::runtime_error("the window is gone");
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
}

TEST(Processes, DisagreementAboutTheBytesIsNamed) {
  const auto statuses = run_processes(2, [](Bootstrap& bootstrap, Shared&) {
    try {
      HostWindows::create(bootstrap, bootstrap.rank() == 0 ? 4096 : 8192);
    } catch (const Error& error) {
      const std::string text = error.what();
      if (error.kind() == ErrorKind::kMismatch && text.find("4096") != text.npos && text.find("8192") != text.npos)
        return;
      throw;
    }
    throw std::runtime_error("accepted");
  });
  EXPECT_EQ(statuses, std::vector<int>(2, 0));
}

// Says of every other rank that it is another process; bytes 8 to 15 of what describes a window are the process.
class ContainerBootstrap : public ThreadBootstrap {
 public:
  using ThreadBootstrap::ThreadBootstrap;
  std::vector<std::string> allgather(std::string_view mine) override {
    auto all = ThreadBootstrap::allgather(mine);
    for (int r = 0; r < num_ranks(); r++) {
      if (r != rank() && all[r].size() > 8) all[r][8] ^= 1;
    }
    return all;
  }
};

// The first process of every container has the id 1. Taken for threads, they would follow one another's pointers.
TEST(Processes, WithOneIdAreNotThreads) {
  Meeting meeting(1, 1);
  EXPECT_NE(HostWindows::create(*std::make_unique<ContainerBootstrap>(meeting, 0), 4096), nullptr);
  const auto problems = run_ranks(2, [two = std::make_shared<Meeting>(2, 60)](Bootstrap& bootstrap) {
    ContainerBootstrap container(*two, bootstrap.rank());
    HostWindows::create(container, 4096);
  });
  for (const std::string& problem : problems) {
    EXPECT_NE(problem.find("ranks 0 and 1 are two processes, both with the id"), std::string::npos) << problem;
  }
}

template <class Config>
void run_stress_in_processes(typename Config::Mode mode, uint64_t seed, void (*run)(Bootstrap&, const Config&)) {
  for (int domain_size : {4, 2, 1}) {
    Config config;
    config.domain_size = domain_size;
    config.mode = mode;
    config.rounds = 60 / kSlowdown;
    config.seed = config.network_seed = seed + domain_size;
    const auto statuses = run_processes(4, [&](Bootstrap& bootstrap, Shared&) { run(bootstrap, config); });
    EXPECT_EQ(statuses, std::vector<int>(4, 0)) << "domains of " << domain_size;
  }
}

TEST(Processes, RunTheProtocol) { run_stress_in_processes(StressConfig::Mode::kPipelined, 77, run_stress_rank); }

TEST(Processes, RunHighThroughput) { run_stress_in_processes(HtStressConfig::Mode::kMixed, 87, run_ht_stress_rank); }

}  // namespace
}  // namespace ep
