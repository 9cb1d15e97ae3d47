// The part of a window in which tensors lie that other ranks write to, or read, where they are. Extents are cut first
// fit: a tensor each on the CPU; on a GPU they are the segments of torch's own allocator (csrc/torch/ops/arena_pool.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "layout/common/region.h"

namespace ep {

class Arena {
 public:
  // `owner` keeps the memory for as long as an extent lives, the buffer's end or not.
  Arena(char* base, Offset offset, uint64_t bytes, std::shared_ptr<void> owner);

  // An extent of at least `bytes`, free when its last user lets go; null if there is no room.
  static std::shared_ptr<void> take(const std::shared_ptr<Arena>& arena, uint64_t bytes);
  // Where in the window [data, data + bytes) lies, or kNoOffset.
  Offset offset_of(const void* data, uint64_t bytes) const;
  uint64_t bytes() const { return bytes_; }
  uint64_t free_bytes() const;
  uint64_t largest_free() const;  // that lie together

 private:
  void give_back(uint64_t start, uint64_t size);

  char* const base_;
  const Offset offset_;
  const uint64_t bytes_;
  const std::shared_ptr<void> owner_;
  const int forks_;
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // start: size, no two adjacent
};

}  // namespace ep
