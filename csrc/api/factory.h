// The backend for a kind of device.
#pragma once

#include "runtime/group.h"

namespace ep {

// False in a build without CUDA.
bool has_cuda_backend();

// `config.device_index` < 0: the CPU backend, else CUDA's.
std::unique_ptr<Group> make_group(Bootstrap& bootstrap, const GroupConfig& config);

}  // namespace ep
