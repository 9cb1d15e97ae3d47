// A launch and its threads, between the files of the emulator.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "device.h"
#include "fiber.h"

namespace ep::emulator {

constexpr int kWarp = 32, kBarriers = 16;

struct Block;
struct Grid;
struct Warp;

// Of a thread, into shared memory.
struct AsyncCopy {
  void* target;
  const void* source;
  int bytes, group;
};

struct Lane {
  Fiber fiber;
  Warp* warp = nullptr;
  int number = 0;  // in the warp
  int bulk_group = 0, copy_group = 0;
  std::vector<AsyncCopy> copies;
  bool waits_at_barrier = false;
};

struct Warp {
  Block* block = nullptr;
  int number = 0;
  uint32_t ready = ~0u, ended = 0;  // bits of lanes
  unsigned slowness = 1;            // it runs in one of so many rounds
  uint64_t values[2][kWarp];        // of the last two operations
  WarpOp op = WarpOp::kSync;
  int num_arrived = 0;
  unsigned generation = 0;
  Lane lanes[kWarp];
};

struct Barrier {
  int num_arrived = 0;
  unsigned generation = 0;
  bool any = false, result = false;
  std::vector<Lane*> waiting;
};

// For other blocks; not in memory yet.
struct Store {
  char* target;
  int bytes;
  unsigned char value[8];
};

// First reads its source, then writes.
struct BulkCopy {
  void* target;
  const void* source;
  int bytes;
  uint64_t* barrier;  // of a load
  Lane* owner;        // of a store
  int group;
  bool has_read = false;
  std::vector<char> data;
};

struct Block {
  Grid* grid = nullptr;
  int number = 0;
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barriers[kBarriers];
  std::vector<char> shared;
  std::vector<std::unique_ptr<char[]>> variables;
  std::deque<Store> stores;
  std::vector<BulkCopy> copies;
};

struct Grid {
  int num_blocks = 0, num_threads = 0;
  size_t shared_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  std::mt19937 random;
  unsigned slowness = 1;  // as a warp's: a rank may be a call behind
  char* stacks = nullptr;
  bool has_ended = false;
  bool weak_is_late = false;  // NCCL_EP_EMULATOR_LATE_WEAK
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Warp*> warps;

  bool odds(unsigned n) { return below(n) == 0; }
  unsigned below(size_t n) { return static_cast<unsigned>(static_cast<uint64_t>(random()) * n >> 32); }
};

// The thread that runs.
Lane& own_lane();
inline Block& own_block() { return *own_lane().warp->block; }
inline Grid& own_grid() { return *own_block().grid; }

// Something of what is late happens.
void perform_any_store(Block& block);
void advance_any_copy(Block& block);

}  // namespace ep::emulator
