// Groups by the name of their buffer: what crosses the boundary of an op is that name.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "runtime/group.h"

namespace ep {

void register_group(const std::string& name, std::shared_ptr<Group> group);
void unregister_group(const std::string& name);
// Throws kInvalidUsage for a name that is not, or no longer, registered.
std::shared_ptr<Group> find_group(std::string_view name);

}  // namespace ep
