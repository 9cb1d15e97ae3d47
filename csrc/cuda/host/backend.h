// The CUDA backend: one process a GPU over NCCL windows, a world of one rank without NCCL, or, for tests, all ranks as
// threads of one process on one GPU.
#pragma once

#include <memory>

#include "runtime/group.h"

namespace ep {

// Collective, on the device of the config, or else the current one. Refuses two ranks of different processes on one
// GPU.
std::unique_ptr<Backend> make_cuda_backend(Bootstrap& bootstrap, const Topology& topology, const Window& window,
                                           const GroupConfig& config);

}  // namespace ep
