#include "runtime/arena.h"

#include <algorithm>

#include "base/fork.h"
#include "layout/ht/offsets.h"

namespace ep {

Arena::Arena(char* base, Offset offset, uint64_t bytes, std::shared_ptr<void> owner)
    : base_(base), offset_(offset), bytes_(bytes), owner_(std::move(owner)), forks_(num_forks()) {
  if (bytes > 0) free_[0] = bytes;
}

std::shared_ptr<void> Arena::take(const std::shared_ptr<Arena>& arena, uint64_t bytes) {
  if (arena == nullptr || bytes > arena->bytes_) return nullptr;
  const uint64_t size = align_up<uint64_t>(std::max<uint64_t>(bytes, 1), kArenaAlignment);
  std::lock_guard lock(arena->mutex_);
  for (auto extent = arena->free_.begin(); extent != arena->free_.end(); ++extent) {
    const auto [start, room] = *extent;
    if (room < size) continue;
    arena->free_.erase(extent);
    if (room > size) arena->free_[start + size] = room - size;
    return {arena->base_ + start, [arena, start = start, size](void*) { arena->give_back(start, size); }};
  }
  return nullptr;
}

void Arena::give_back(uint64_t start, uint64_t size) {
  if (num_forks() != forks_) return;  // of the parent, one of whose threads may hold the mutex for ever
  std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(start);
  if (next != free_.end() && next->first == start + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == start) {
      before->second += size;
      return;
    }
  }
  free_[start] = size;
}

Offset Arena::offset_of(const void* data, uint64_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(data), base = reinterpret_cast<uintptr_t>(base_);
  if (address < base || bytes > bytes_ || address - base > bytes_ - bytes) return kNoOffset;
  return offset_ + (address - base);
}

uint64_t Arena::free_bytes() const {
  std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  for (const auto& [start, size] : free_) sum += size;
  return sum;
}

uint64_t Arena::largest_free() const {
  std::lock_guard lock(mutex_);
  uint64_t most = 0;
  for (const auto& [start, size] : free_) most = std::max(most, size);
  return most;
}

}  // namespace ep
