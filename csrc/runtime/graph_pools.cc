#include "runtime/graph_pools.h"

#include <utility>

namespace ep {

void* ArenaSegments::take(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  Extent extent = lent_ != nullptr && bytes <= lent_bytes_ ? std::move(lent_) : Arena::take(arena_, bytes);
  void* data = extent.get();
  if (data != nullptr) extents_[data] = std::move(extent);
  return data;
}

void ArenaSegments::give_back(void* data) {
  Extent extent;  // freed without the lock: it may be another allocator's
  std::lock_guard lock(mutex_);
  const auto found = extents_.find(data);
  if (found == extents_.end()) return;
  extent = std::move(found->second);
  extents_.erase(found);
}

void ArenaSegments::lend(Extent extent, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  lent_.swap(extent);
  lent_bytes_ = bytes;
}

bool ArenaSegments::is_empty() const {
  std::lock_guard lock(mutex_);
  return extents_.empty();
}

void GraphPools::Graph::close() {
  if (!std::exchange(is_closed, true)) pool->close();
}

GraphPools::~GraphPools() {
  for (auto& [capture, graph] : graphs_) {
    graph.close();
    graph.pool->give_back();
  }
}

GraphPools::Pool* GraphPools::find(Capture capture) const {
  const auto found = graphs_.find(capture);
  return found == graphs_.end() ? nullptr : found->second.pool.get();
}

GraphPools::Pool* GraphPools::add(Capture capture, Flag is_gone, std::unique_ptr<Pool> pool) {
  Graph& graph = graphs_[capture];
  graph = {std::move(is_gone), std::move(pool)};
  return graph.pool.get();
}

void GraphPools::collect() {
  for (auto each = graphs_.begin(); each != graphs_.end();) {
    Graph& graph = each->second;
    bool is_done = false;
    if (graph.is_gone->load(std::memory_order_acquire)) {
      graph.close();
      is_done = graph.pool->give_back();
    }
    each = is_done ? graphs_.erase(each) : std::next(each);
  }
}

}  // namespace ep
