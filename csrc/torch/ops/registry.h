// Groups by the tensor of their buffer that every op takes, `seq`: its shape [id, R, domain size, 0] says which buffer
// it is, and what fakes must know of it. A length may be a symbol, so that one compilation serves all buffers of equal
// R; it has no elements, and copies of it (functionalization makes them) say the same.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "runtime/group.h"
#include "torch/ops/arena_pool.h"
#include "torch/ops/beside.h"
#include "torch/ops/device.h"

namespace ep {

// What an op finds by a buffer's name.
struct Registered {
  std::string name;
  std::shared_ptr<Group> group;
  StreamOrder order;
  Arrivals arrivals;  // of the next dispatch
  Beside beside;
  int process = 0;  // that made the buffer
  int forks = 0;    // of which it was the child, as far as known

  Arrivals take_arrivals() { return std::exchange(arrivals, {}); }

  // On a GPU; null where outputs cannot lie in the arena. Made when first asked for.
  ArenaPool* pool() {
    std::call_once(has_pool_, [this] { pool_ = ArenaPool::make(group->arena(), device_of(*group)); });
    return pool_.get();
  }

 private:
  std::once_flag has_pool_;
  std::unique_ptr<ArenaPool> pool_;
};

// Returns the id, which no other group of this process has had. Refuses a name that another has now.
int64_t register_group(const std::string& name, std::shared_ptr<Group> group);
// What was found under the id until now, or null.
std::shared_ptr<Registered> unregister_group(int64_t id);
// Throws kInvalidUsage for a buffer that is not, or no longer, there.
std::shared_ptr<Registered> find_group(const at::Tensor& seq);

}  // namespace ep
