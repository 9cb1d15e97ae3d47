// How a buffer gets its memory on a GPU, its window, and its network.
#pragma once

#include <memory>

#include "cuda/host/memory.h"
#include "layout/window.h"
#include "runtime/group.h"

namespace ep {

// Collective.
std::unique_ptr<Memory> set_up(Bootstrap& bootstrap, const Topology& topology, const Window& window,
                               const GroupConfig& config);

}  // namespace ep
