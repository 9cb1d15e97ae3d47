// Tensors in a window's arena on a GPU: a pool of torch's own CUDA allocator lies over it, so that its rules hold.
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "runtime/arena.h"

namespace ep {

class ArenaPool {
 public:
  // Null where torch's allocator can have no such pool (another allocator was chosen), or there is no arena.
  static std::unique_ptr<ArenaPool> make(std::shared_ptr<Arena> arena, const at::Device& device);
  virtual ~ArenaPool() = default;

  // On the current stream, to which the memory belongs as to that of any tensor: it is used again in that stream's
  // order, and after what record_stream names. Where the arena has no room, or under capture, an ordinary tensor.
  virtual at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) = 0;
};

}  // namespace ep
