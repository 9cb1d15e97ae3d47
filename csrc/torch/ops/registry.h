// Groups by the name of their buffer: what crosses the boundary of an op is that name.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "runtime/group.h"
#include "torch/ops/arena_pool.h"
#include "torch/ops/device.h"

namespace ep {

// What an op finds by a buffer's name.
struct Registered {
  std::shared_ptr<Group> group;
  StreamOrder order;
  int process = 0;  // that made the buffer
  int forks = 0;    // of which it was the child, as far as known

  // On a GPU; null where outputs cannot lie in the arena. Made when first asked for.
  ArenaPool* pool() {
    std::call_once(has_pool_, [this] { pool_ = ArenaPool::make(group->arena(), device_of(*group)); });
    return pool_.get();
  }

 private:
  std::once_flag has_pool_;
  std::unique_ptr<ArenaPool> pool_;
};

void register_group(const std::string& name, std::shared_ptr<Group> group);
// What was found under the name until now, or null.
std::shared_ptr<Registered> unregister_group(const std::string& name);
// Throws kInvalidUsage for a name that is not, or no longer, registered.
std::shared_ptr<Registered> find_group(std::string_view name);

}  // namespace ep
