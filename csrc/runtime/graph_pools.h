// Memory that captured graphs write at every replay. What a capture has allocated is its graph's for as long as that
// may be replayed, whether or not the tensors live: so each graph has a pool of its own, of which nothing else
// allocates.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "runtime/arena.h"

namespace ep {

// Parts of an arena, from which an allocator cuts extents.
class ArenaSegments {
 public:
  using Extent = std::shared_ptr<void>;

  explicit ArenaSegments(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  void* take(uint64_t bytes);  // null: no room
  void give_back(void* data);
  // What the next take() of no more bytes gets, before the arena is asked. Null: nothing.
  void lend(Extent extent, uint64_t bytes);
  bool is_empty() const;  // all that was taken is back

 private:
  const std::shared_ptr<Arena> arena_;
  mutable std::mutex mutex_;
  std::map<void*, Extent> extents_;
  Extent lent_;
  uint64_t lent_bytes_ = 0;
};

// By captures. Calls are made by one thread at a time.
class GraphPools {
 public:
  using Capture = unsigned long long;  // CUDA's number of a capture, which no other capture of the process has
  using Flag = std::shared_ptr<std::atomic<bool>>;

  class Pool {
   public:
    virtual ~Pool() = default;
    virtual void close() = 0;  // nothing is allocated from it any more
    // Gives back what no tensor has. True: that was the rest. Asked again until it is.
    virtual bool give_back() = 0;
  };

  GraphPools() = default;
  ~GraphPools();
  GraphPools(const GraphPools&) = delete;
  GraphPools& operator=(const GraphPools&) = delete;

  Pool* find(Capture capture) const;  // null: there is none
  // Any thread sets is_gone, once, when the graph and all that can replay it are gone.
  Pool* add(Capture capture, Flag is_gone, std::unique_ptr<Pool> pool);
  // Closes the pools of graphs that are gone, and forgets those that have given everything back.
  void collect();
  size_t size() const { return graphs_.size(); }

 private:
  struct Graph {
    Flag is_gone;
    std::unique_ptr<Pool> pool;
    bool is_closed = false;

    void close();
  };

  std::map<Capture, Graph> graphs_;
};

}  // namespace ep
