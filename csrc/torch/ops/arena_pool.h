// Tensors in a window's arena on a GPU: a pool of torch's own CUDA allocator lies over it, so that its rules hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "runtime/arena.h"

namespace ep {

// Of this thread: what a captured operation returns may lie in the arena, not in the graph's own pool of torch. Not
// where a compiler captures: torch's CUDA graph trees refuse outputs of other pools.
class GraphOutputsScope {
 public:
  GraphOutputsScope() : before_(is_on_) { is_on_ = true; }
  ~GraphOutputsScope() { is_on_ = before_; }
  GraphOutputsScope(const GraphOutputsScope&) = delete;
  GraphOutputsScope& operator=(const GraphOutputsScope&) = delete;
  static bool is_on() { return is_on_; }

 private:
  inline static thread_local bool is_on_ = false;
  const bool before_;
};

class ArenaPool {
 public:
  // Null where torch's allocator can have no such pool (another allocator was chosen), or there is no arena.
  static std::unique_ptr<ArenaPool> make(std::shared_ptr<Arena> arena, const at::Device& device);
  virtual ~ArenaPool() = default;

  // On the current stream, to which the memory belongs as to that of any tensor: it is used again in that stream's
  // order, and after what record_stream names. Under capture it is used again by that capture alone, until the graph is
  // gone. An ordinary tensor where the arena has no room, and under capture outside a GraphOutputsScope.
  virtual at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) = 0;
};

}  // namespace ep
