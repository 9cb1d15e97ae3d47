// The CPU backend: ranks are threads or processes of one machine.
#pragma once

#include <memory>

#include "runtime/group.h"

namespace ep {

std::unique_ptr<Backend> make_cpu_backend(Bootstrap& bootstrap, const Topology& topology, const Window& window,
                                          const GroupConfig& config);

}  // namespace ep
