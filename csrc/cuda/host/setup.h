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

// A rank of an elastic buffer, whose set_up() runs in its new process, is replaced. The window is clean afterwards, and
// the device must be idle. Collective among those who meet.
void replace_rank(Bootstrap& bootstrap, Memory& memory, const Window& window, int rank, double seconds);

}  // namespace ep
