#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "grid.h"

namespace ep::emulator {
namespace {

#if defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif

constexpr size_t kMaxFreeStacks = 100'000;  // of which each has touched some pages

Lane* running = nullptr;  // of the device's thread, the only one that runs kernels

// ---- Turns

void run_lane(void* argument) {
  Lane* lane = static_cast<Lane*>(argument);
  (*own_grid().kernel)();
  for (const BulkCopy& copy : own_block().copies) {
    if (copy.owner == lane && !copy.has_read) die("a thread ended before its bulk copies had read their sources");
  }
  if (!lane->copies.empty()) die("a thread ended before its copies into shared memory");
  lane->warp->ended |= 1u << lane->number;
  lane->warp->ready &= ~(1u << lane->number);
}

void wait_in_line(Lane& lane) {
  lane.warp->ready &= ~(1u << lane.number);
  lane.fiber.pause();
}

// Shared memory begins as garbage.
void spoil(Grid& grid, char* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i += sizeof(uint32_t)) {
    const uint32_t word = static_cast<uint32_t>(grid.random());
    std::memcpy(memory + i, &word, std::min(sizeof word, bytes - i));
  }
}

std::unique_ptr<Block> make_block(Grid& grid, int number) {
  auto block = std::make_unique<Block>();
  block->grid = &grid;
  block->number = number;
  block->shared.resize(grid.shared_bytes + 128);
  spoil(grid, block->shared.data(), block->shared.size());
  char* stack = grid.stacks + static_cast<size_t>(number) * grid.num_threads * kStackBytes;
  for (int w = 0; w < grid.num_threads / kWarp; w++) {
    auto warp = std::make_unique<Warp>();
    warp->block = block.get();
    warp->number = w;
    if (grid.slowness == 1 && grid.odds(16)) warp->slowness = grid.odds(2) ? 4 : 16;
    for (int i = 0; i < kWarp; i++, stack += kStackBytes) {
      Lane& lane = warp->lanes[i];
      lane.warp = warp.get();
      lane.number = i;
      lane.fiber.start(stack, kStackBytes, &run_lane, &lane);
    }
    grid.warps.push_back(warp.get());
    block->warps.push_back(std::move(warp));
  }
  return block;
}

void print_waiting(const Grid& grid) {
  for (const Warp* warp : grid.warps) {
    if (warp->ended == ~0u) continue;
    unsigned at_barrier = 0;
    for (const Lane& lane : warp->lanes) at_barrier |= static_cast<unsigned>(lane.waits_at_barrier) << lane.number;
    std::fprintf(stderr, "block %d warp %d: ended %08x, at a barrier %08x, in operation %d of the warp: %d lanes\n",
                 warp->block->number, warp->number, warp->ended, at_barrier, static_cast<int>(warp->op),
                 warp->num_arrived);
  }
}

// All warps that can run, in a new order each time, then what is late. False if nothing is left to do.
bool run_round(Grid& grid) {
  bool has_work = false;
  for (size_t i = grid.warps.size(); i-- > 0;) {
    std::swap(grid.warps[i], grid.warps[grid.below(i + 1)]);
    Warp& warp = *grid.warps[i];
    if (warp.ready == 0) continue;
    has_work = true;
    if (!grid.odds(warp.slowness)) continue;
    const unsigned first = grid.below(kWarp);
    for (unsigned k = 0; k < kWarp; k++) {
      Lane& lane = warp.lanes[(first + k) % kWarp];
      if ((warp.ready >> lane.number & 1) == 0) continue;
      running = &lane;
      lane.fiber.resume();
      running = nullptr;
    }
  }
  for (auto& block : grid.blocks) {
    has_work = has_work || !block->copies.empty();
    for (int i = 0; i < 4; i++) {
      if (grid.odds(2)) perform_any_store(*block);
      if (grid.odds(2)) advance_any_copy(*block);
    }
  }
  return has_work;
}

// True when the grid has ended.
bool advance(Grid& grid) {
  if (grid.blocks.empty()) {
    if (grid.odds(6)) grid.slowness = 4u << 2 * grid.below(3);
    for (int b = 0; b < grid.num_blocks; b++) grid.blocks.push_back(make_block(grid, b));
  }
  if (!grid.odds(grid.slowness) || run_round(grid)) return false;
  if (!std::all_of(grid.warps.begin(), grid.warps.end(), [](const Warp* warp) { return warp->ended == ~0u; })) {
    print_waiting(grid);
    die("every thread waits for another one");
  }
  for (auto& block : grid.blocks) {
    while (!block->stores.empty()) perform_any_store(*block);
  }
  return true;
}

// ---- The thread of the device

class Device {
 public:
  // Runs on when the process ends.
  static Device& get() {
    static Device* device = new Device;
    return *device;
  }

  void run(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
    Grid grid;
    grid.num_blocks = blocks;
    grid.num_threads = threads;
    grid.shared_bytes = shared_bytes;
    grid.kernel = &kernel;
    const char* weak = std::getenv("NCCL_EP_EMULATOR_LATE_WEAK");
    grid.weak_is_late = weak != nullptr && std::strcmp(weak, "1") == 0;
    std::unique_lock lock(mutex_);
    grid.random.seed(seeds_());
    const size_t num_stacks = static_cast<size_t>(blocks) * threads;
    grid.stacks = take_stacks(num_stacks);
    grids_.push_back(&grid);
    changed_.notify_all();
    changed_.wait(lock, [&] { return grid.has_ended; });
    give_back(grid.stacks, num_stacks);
  }

 private:
  Device() {
    const char* seed = std::getenv("NCCL_EP_EMULATOR_SEED");
    seeds_.seed(seed != nullptr ? static_cast<unsigned>(std::strtoul(seed, nullptr, 0)) : 1u);
    std::thread([this] { serve(); }).detach();
  }

  void serve() {
    std::vector<Grid*> active;
    while (true) {
      {
        std::unique_lock lock(mutex_);
        if (active.empty()) changed_.wait(lock, [&] { return !grids_.empty(); });
        active.insert(active.end(), grids_.begin(), grids_.end());
        grids_.clear();
      }
      bool has_any_ended = false;
      for (Grid*& grid : active) {
        if (!advance(*grid)) continue;
        has_any_ended = true;
        std::lock_guard lock(mutex_);
        grid->has_ended = true;  // its owner waits for the lock
        grid = nullptr;
      }
      active.erase(std::remove(active.begin(), active.end(), nullptr), active.end());
      if (has_any_ended) changed_.notify_all();  // all owners wake: not in every round
    }
  }

  // Those of a launch of the same size, or new ones.
  char* take_stacks(size_t threads) {
    const auto fits = [&](const auto& each) { return each.second == threads; };
    const auto found = std::find_if(free_stacks_.begin(), free_stacks_.end(), fits);
    if (found != free_stacks_.end()) {
      char* stacks = found->first;
      free_stacks_.erase(found);
      return stacks;
    }
    void* fresh = mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) die("no memory for the stacks of a launch");
    return static_cast<char*>(fresh);
  }

  void give_back(char* stacks, size_t threads) {
    free_stacks_.emplace_back(stacks, threads);
    size_t kept = 0;
    for (const auto& each : free_stacks_) kept += each.second;
    while (kept > kMaxFreeStacks) {
      const auto [oldest, count] = free_stacks_.front();
      munmap(oldest, count * kStackBytes);
      kept -= count;
      free_stacks_.erase(free_stacks_.begin());
    }
  }

  std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  std::vector<Grid*> grids_;                           // to be run
  std::vector<std::pair<char*, size_t>> free_stacks_;  // of so many threads; the oldest first
  std::mt19937 seeds_;
};

}  // namespace

Lane& own_lane() { return *running; }

void die(const char* what) {
  std::fprintf(stderr, "gpu emulator: %s", what);
  if (running != nullptr) {
    std::fprintf(stderr, " (block %d warp %d lane %d)", own_block().number, running->warp->number, running->number);
  }
  std::fprintf(stderr, "\n");
  std::abort();
}

void launch(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
  if (blocks < 1 || threads < 1 || threads % kWarp != 0) die("a launch has blocks of whole warps");
  Device::get().run(blocks, threads, shared_bytes, kernel);
}

unsigned thread_index() { return static_cast<unsigned>(own_lane().warp->number * kWarp + own_lane().number); }
unsigned block_index() { return static_cast<unsigned>(own_block().number); }
unsigned block_dim() { return static_cast<unsigned>(own_grid().num_threads); }
unsigned grid_dim() { return static_cast<unsigned>(own_grid().num_blocks); }
int lane() { return own_lane().number; }

void pause() { own_lane().fiber.pause(); }

// ---- A warp, a block

const uint64_t* gather(WarpOp op, uint64_t value, unsigned mask) {
  Lane& self = own_lane();
  Warp& warp = *self.warp;
  if (mask != ~0u) die("only operations of whole warps are emulated");
  if (warp.num_arrived == 0) warp.op = op;
  if (warp.op != op) die("the lanes of a warp are in different operations");
  if (warp.ended != 0) die("a lane ended before an operation of its warp");
  const unsigned generation = warp.generation;
  uint64_t* values = warp.values[generation % 2];
  values[self.number] = value;
  if (++warp.num_arrived < kWarp) {
    wait_in_line(self);
  } else {
    warp.num_arrived = 0;
    warp.generation++;
    warp.ready = ~0u;
  }
  return values;
}

namespace {

void arrive(Barrier& barrier, int threads, bool value) {
  barrier.any = barrier.any || value;
  if (++barrier.num_arrived < threads) return;
  barrier.num_arrived = 0;
  barrier.generation++;
  barrier.result = std::exchange(barrier.any, false);
  for (Lane* lane : barrier.waiting) {
    lane->warp->ready |= 1u << lane->number;
    lane->waits_at_barrier = false;
  }
  barrier.waiting.clear();
}

}  // namespace

bool barrier(int id, int threads, bool value) {
  Lane& self = own_lane();
  Barrier& barrier = own_block().barriers[id];
  const unsigned generation = barrier.generation;
  arrive(barrier, threads < 0 ? own_grid().num_threads : threads, value);
  if (barrier.generation == generation) {
    barrier.waiting.push_back(&self);
    self.waits_at_barrier = true;
    wait_in_line(self);
  }
  return barrier.result;
}

void barrier_arrive(int id, int threads) { arrive(own_block().barriers[id], threads, false); }

// ---- Shared memory

namespace {

std::vector<size_t>& variable_sizes() {
  static std::vector<size_t> sizes;
  return sizes;
}

}  // namespace

char* dynamic_shared() {
  const auto address = reinterpret_cast<uintptr_t>(own_block().shared.data());
  return reinterpret_cast<char*>((address + 127) / 128 * 128);
}

int new_static_shared(size_t bytes) {
  variable_sizes().push_back(bytes);
  return static_cast<int>(variable_sizes().size()) - 1;
}

void* static_shared(int number) {
  auto& variables = own_block().variables;
  if (variables.size() <= static_cast<size_t>(number)) variables.resize(number + 1);
  std::unique_ptr<char[]>& variable = variables[number];
  if (!variable) {
    const size_t bytes = variable_sizes()[number];
    variable = std::make_unique<char[]>(bytes);
    spoil(own_grid(), variable.get(), bytes);
  }
  return variable.get();
}

}  // namespace ep::emulator
