// Groups by the name of their buffer: what crosses the boundary of an op is that name.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "runtime/group.h"
#include "torch/device.h"

namespace ep {

// What an op finds by a buffer's name.
struct Registered {
  std::shared_ptr<Group> group;
  CallOrder order;
  int process = 0;  // that made the buffer
  int forks = 0;    // of which it was the child, as far as known
};

void register_group(const std::string& name, std::shared_ptr<Group> group);
void unregister_group(const std::string& name);
// Throws kInvalidUsage for a name that is not, or no longer, registered.
std::shared_ptr<Registered> find_group(std::string_view name);

}  // namespace ep
