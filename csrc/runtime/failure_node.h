// Which node a failure is about: an operator looks for a machine, not for a rank.
#pragma once

#include <string>

#include "layout/common/topology.h"
#include "runtime/failure.h"

namespace ep {

// Follows describe(failure) in an error's text. Empty for one domain, and where no single rank was waited for.
std::string node_of(const Failure& failure, const Topology& topology);

}  // namespace ep
