#include "runtime/graph_pools.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "layout/ht/offsets.h"

namespace ep {
namespace {

constexpr uint64_t kUnit = kArenaAlignment;

// ---- Segments

class Segments : public testing::Test {
 protected:
  uint64_t free_units() const { return arena_->free_bytes() / kUnit; }

  std::vector<char> memory_ = std::vector<char>(8 * kUnit);
  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>(memory_.data(), 0, memory_.size(), nullptr);
  ArenaSegments segments_{arena_};
};

TEST_F(Segments, AreOfTheArenaUntilTheyAreGivenBack) {
  void* first = segments_.take(3 * kUnit);
  void* second = segments_.take(5 * kUnit);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(segments_.take(1), nullptr) << "there was no room";
  EXPECT_EQ(free_units(), 0u);
  segments_.give_back(first);
  EXPECT_FALSE(segments_.is_empty());
  segments_.give_back(first);  // nothing happens
  EXPECT_EQ(free_units(), 3u);
  segments_.give_back(second);
  EXPECT_TRUE(segments_.is_empty());
  EXPECT_EQ(free_units(), 8u);
}

TEST_F(Segments, WhatIsLentIsTakenFirstAndReturnsToItsLender) {
  const std::shared_ptr<void> all = Arena::take(arena_, memory_.size());
  int returned = 0;
  char lent[4];
  const auto lend = [&](uint64_t bytes) {
    segments_.lend(ArenaSegments::Extent(lent, [&](void*) { returned++; }), bytes);
  };
  lend(kUnit);
  EXPECT_EQ(segments_.take(kUnit + 1), nullptr) << "it is larger than what was lent";
  EXPECT_EQ(returned, 0);
  EXPECT_EQ(segments_.take(kUnit), lent);
  EXPECT_EQ(segments_.take(kUnit), nullptr) << "it was lent once";
  EXPECT_EQ(returned, 0);
  segments_.give_back(lent);
  EXPECT_EQ(returned, 1);
  lend(kUnit);
  segments_.lend(nullptr, 0);
  EXPECT_EQ(returned, 2) << "nobody wanted it";
  EXPECT_TRUE(segments_.is_empty());
}

TEST_F(Segments, ALenderMayBeAskedMeanwhile) {
  // As torch's allocator may free its block, whose lock it holds, and ask for another.
  segments_.lend(ArenaSegments::Extent(memory_.data(), [&](void*) { EXPECT_NE(segments_.take(kUnit), nullptr); }), 1);
  ASSERT_EQ(segments_.take(1), memory_.data());
  segments_.give_back(memory_.data());
  EXPECT_EQ(free_units(), 7u);
}

// ---- Pools

struct FakePool : GraphPools::Pool {
  struct Log {
    int closed = 0, asked = 0, died = 0;
    int tensors = 0;  // that still live
  };

  explicit FakePool(Log& log) : log(log) {}
  ~FakePool() override { log.died++; }
  void close() override { log.closed++; }
  bool give_back() override {
    EXPECT_EQ(log.closed, 1) << "what is open may be allocated from";
    log.asked++;
    return log.tensors == 0;
  }

  Log& log;
};

GraphPools::Flag alive() { return std::make_shared<std::atomic<bool>>(false); }

TEST(GraphPools, ACaptureHasOnePool) {
  FakePool::Log one, two;
  GraphPools graphs;
  EXPECT_EQ(graphs.find(7), nullptr);
  GraphPools::Pool* first = graphs.add(7, alive(), std::make_unique<FakePool>(one));
  GraphPools::Pool* second = graphs.add(8, alive(), std::make_unique<FakePool>(two));
  EXPECT_NE(first, second);
  EXPECT_EQ(graphs.find(7), first);
  EXPECT_EQ(graphs.find(8), second);
  EXPECT_EQ(graphs.find(9), nullptr);
}

TEST(GraphPools, APoolLivesAsLongAsItsGraph) {
  FakePool::Log log, other;  // without tensors: they are dead
  GraphPools graphs;
  const GraphPools::Flag is_gone = alive();
  graphs.add(1, is_gone, std::make_unique<FakePool>(log));
  graphs.add(2, alive(), std::make_unique<FakePool>(other));
  for (int i = 0; i < 3; i++) graphs.collect();
  EXPECT_EQ(log.closed + log.asked + log.died, 0);
  std::thread([&] { is_gone->store(true); }).join();
  EXPECT_EQ(log.closed + log.asked + log.died, 0) << "in CUDA's thread";
  graphs.collect();
  EXPECT_EQ(log.closed, 1);
  EXPECT_EQ(log.died, 1);
  EXPECT_EQ(graphs.find(1), nullptr);
  EXPECT_EQ(other.closed + other.asked + other.died, 0);
  EXPECT_EQ(graphs.size(), 1u);
}

TEST(GraphPools, APoolLivesAsLongAsItsTensors) {
  FakePool::Log log{.tensors = 2};
  GraphPools graphs;
  const GraphPools::Flag is_gone = alive();
  graphs.add(1, is_gone, std::make_unique<FakePool>(log));
  is_gone->store(true);
  for (int i = 1; i <= 3; i++) {
    graphs.collect();
    EXPECT_EQ(log.asked, i);
  }
  EXPECT_EQ(log.closed, 1) << "once";
  EXPECT_EQ(log.died, 0);
  log.tensors = 0;
  graphs.collect();
  EXPECT_EQ(log.died, 1);
  EXPECT_EQ(graphs.size(), 0u);
}

TEST(GraphPools, AtTheEndAllAreClosed) {
  FakePool::Log of_living{.tensors = 1}, of_dead{.tensors = 1};
  const GraphPools::Flag is_gone = alive();
  {
    GraphPools graphs;
    graphs.add(1, alive(), std::make_unique<FakePool>(of_living));
    graphs.add(2, is_gone, std::make_unique<FakePool>(of_dead));
    is_gone->store(true);
    graphs.collect();
  }
  for (const FakePool::Log* log : {&of_living, &of_dead}) {
    EXPECT_EQ(log->closed, 1);
    EXPECT_GE(log->asked, 1);
    EXPECT_EQ(log->died, 1);
  }
}

}  // namespace
}  // namespace ep
