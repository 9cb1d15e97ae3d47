#include "runtime/arena.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "layout/ht/offsets.h"

namespace ep {
namespace {

std::shared_ptr<Arena> make_arena(std::vector<char>& memory, std::shared_ptr<void> owner = nullptr) {
  return std::make_shared<Arena>(memory.data(), 4096, memory.size(), std::move(owner));
}

TEST(Arena, BlocksAreApartAndComeBack) {
  std::vector<char> memory(64 * kArenaAlignment);
  const auto arena = make_arena(memory);
  std::mt19937 random(3);
  struct Held {
    std::shared_ptr<void> block;
    uint64_t begin, end;
  };
  std::vector<Held> held;
  int refused = 0;
  for (int step = 0; step < 5000; step++) {
    if (held.empty() || random() % 2 == 0) {
      const uint64_t bytes = 1 + random() % (12 * kArenaAlignment);
      const uint64_t room = arena->largest_free();
      std::shared_ptr<void> block = Arena::take(arena, bytes);
      ASSERT_EQ(block != nullptr, align_up(bytes, kArenaAlignment) <= room);
      refused += block == nullptr;
      if (block == nullptr) continue;
      const auto begin = static_cast<uint64_t>(static_cast<char*>(block.get()) - memory.data());
      ASSERT_EQ(begin % kArenaAlignment, 0u);
      ASSERT_LE(begin + bytes, memory.size());
      ASSERT_EQ(arena->offset_of(block.get(), bytes), 4096 + begin);
      for (const Held& other : held) ASSERT_TRUE(begin + bytes <= other.begin || other.end <= begin);
      held.push_back({std::move(block), begin, begin + bytes});
    } else {
      held.erase(held.begin() + random() % held.size());
    }
  }
  EXPECT_GT(refused, 0);
  held.clear();
  EXPECT_EQ(arena->free_bytes(), memory.size());
  EXPECT_NE(Arena::take(arena, memory.size()), nullptr) << "the free blocks have not grown together";
}

TEST(Arena, KnowsWhatLiesInside) {
  std::vector<char> memory(1024);
  const auto arena = make_arena(memory);
  EXPECT_EQ(arena->offset_of(memory.data() + 16, 100), 4112u);
  EXPECT_EQ(arena->offset_of(memory.data(), 1024), 4096u);
  EXPECT_EQ(arena->offset_of(memory.data() + 1, 1024), kNoOffset);
  EXPECT_EQ(arena->offset_of(&arena, 8), kNoOffset);
  EXPECT_EQ(Arena::take(nullptr, 8), nullptr);
}

TEST(Arena, ABlockKeepsTheMemory) {
  std::vector<char> memory(1024);
  auto owner = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = owner;
  auto arena = make_arena(memory, std::move(owner));
  std::shared_ptr<void> block = Arena::take(arena, 8);
  arena.reset();
  EXPECT_FALSE(alive.expired());
  block.reset();
  EXPECT_TRUE(alive.expired());
}

}  // namespace
}  // namespace ep
