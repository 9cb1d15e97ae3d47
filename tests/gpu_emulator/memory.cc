// Memory of the emulated GPU: what is late, and in what order it comes.
#include <cstddef>
#include <cstring>

#include "grid.h"

namespace ep::emulator {
namespace {

constexpr size_t kMaxStores = 64;  // kept back by a block

void perform(std::deque<Store>& stores, size_t i) {
  std::memcpy(stores[i].target, stores[i].value, stores[i].bytes);
  stores.erase(stores.begin() + static_cast<std::ptrdiff_t>(i));
}

bool overlaps(const void* a, int a_bytes, const void* b, int b_bytes) {
  const auto *p = static_cast<const char*>(a), *q = static_cast<const char*>(b);
  return p < q + b_bytes && q < p + a_bytes;
}

// The next step of a copy; true when it is done.
bool advance(BulkCopy& copy) {
  if (!copy.has_read) {
    const char* source = static_cast<const char*>(copy.source);
    copy.data.assign(source, source + copy.bytes);
    copy.has_read = true;
    return false;
  }
  std::memcpy(copy.target, copy.data.data(), copy.bytes);
  return true;
}

// An mbarrier: arrivals of each phase, those to come, the phase, bytes to come (below zero if they came too soon).
struct BarrierWord {
  uint32_t arrivals : 8, missing : 8, parity : 1, unused : 15;
  int32_t bytes;
};
static_assert(sizeof(BarrierWord) == sizeof(uint64_t));

BarrierWord get(const uint64_t* barrier) {
  BarrierWord word;
  std::memcpy(&word, barrier, sizeof word);
  return word;
}

void put(uint64_t* barrier, BarrierWord word) {
  if (word.missing == 0 && word.bytes == 0) {
    word.missing = word.arrivals;
    word.parity ^= 1u;
  }
  std::memcpy(barrier, &word, sizeof word);
}

void finish(Block& block, size_t i) {
  if (uint64_t* barrier = block.copies[i].barrier) {
    BarrierWord word = get(barrier);
    word.bytes -= block.copies[i].bytes;
    put(barrier, word);
  }
  block.copies.erase(block.copies.begin() + static_cast<std::ptrdiff_t>(i));
}

void check_copy(const void* a, const void* b, int bytes) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  if (((bits | static_cast<uintptr_t>(bytes)) & 15) != 0) die("a bulk copy is not aligned to 16 bytes");
}

}  // namespace

// ---- Stores

void perform_any_store(Block& block) {
  std::deque<Store>& stores = block.stores;
  if (stores.empty()) return;
  size_t i = block.grid->below(stores.size());
  for (size_t j = 0; j < i; j++) {  // those to the same word keep their order
    if (stores[j].target == stores[i].target) i = j;
  }
  perform(stores, i);
}

void store(void* target, const void* source, int bytes) {
  Block& block = own_block();
  Store late{static_cast<char*>(target), bytes, {}};
  std::memcpy(late.value, source, bytes);
  block.stores.push_back(late);
  if (block.stores.size() > kMaxStores) perform_any_store(block);
}

void store_weak(void* target, const void* source, int bytes) {
  if (own_grid().weak_is_late) return store(target, source, bytes);
  std::memcpy(target, source, bytes);
}

void load(void* target, const void* source, int bytes) {
  std::deque<Store>& stores = own_block().stores;
  for (size_t i = 0; i < stores.size();) {
    if (overlaps(stores[i].target, stores[i].bytes, source, bytes)) {
      perform(stores, i);
    } else {
      i++;
    }
  }
  std::memcpy(target, source, bytes);
}

void fence() {
  Block& block = own_block();
  while (!block.stores.empty()) perform_any_store(block);
}

// ---- Bulk copies

void mbarrier_init(uint64_t* barrier, int arrivals) {
  BarrierWord word{};
  word.arrivals = word.missing = static_cast<unsigned>(arrivals);
  std::memcpy(barrier, &word, sizeof word);
}

void mbarrier_expect(uint64_t* barrier, int bytes) {
  BarrierWord word = get(barrier);
  if (word.missing == 0) die("more arrivals at an mbarrier than it was made for");
  word.missing--;
  word.bytes += bytes;
  put(barrier, word);
}

bool mbarrier_has_passed(uint64_t* barrier, uint32_t parity) {
  pause();
  return get(barrier).parity != parity;
}

void advance_any_copy(Block& block) {
  if (block.copies.empty()) return;
  const size_t i = block.grid->below(block.copies.size());
  if (advance(block.copies[i])) finish(block, i);
}

void bulk_load(void* shared, const void* global, int bytes, uint64_t* barrier) {
  check_copy(shared, global, bytes);
  own_block().copies.push_back({shared, global, bytes, barrier, nullptr, 0, false, {}});
}

void bulk_store(void* global, const void* shared, int bytes) {
  check_copy(shared, global, bytes);
  own_block().copies.push_back({global, shared, bytes, nullptr, &own_lane(), own_lane().bulk_group, false, {}});
}

void bulk_commit() { own_lane().bulk_group++; }

void bulk_wait(int pending, bool only_read) {
  Block& block = own_block();
  const Lane& lane = own_lane();
  for (size_t i = 0; i < block.copies.size();) {
    BulkCopy& copy = block.copies[i];
    if (copy.owner != &lane || copy.group >= lane.bulk_group - pending || (copy.has_read && only_read)) {
      i++;
    } else if (advance(copy)) {
      finish(block, i);
    }
  }
}

// ---- Copies of a thread

namespace {

void perform(std::vector<AsyncCopy>& copies, size_t i) {
  std::memcpy(copies[i].target, copies[i].source, copies[i].bytes);
  copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
}

}  // namespace

void copy_async(void* shared, const void* global, int bytes) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if ((bits & static_cast<uintptr_t>(bytes - 1)) != 0) die("a thread's copy is not aligned to its size");
  Lane& lane = own_lane();
  lane.copies.push_back({shared, global, bytes, lane.copy_group});
  if (own_grid().odds(8)) perform(lane.copies, own_grid().below(lane.copies.size()));
}

void copy_async_commit() { own_lane().copy_group++; }

void copy_async_wait(int pending) {
  Lane& lane = own_lane();
  for (size_t i = lane.copies.size(); i-- > 0;) {
    if (lane.copies[i].group < lane.copy_group - pending) perform(lane.copies, i);
  }
}

}  // namespace ep::emulator
