// The backend for a kind of device.
#pragma once

#include <vector>

#include "runtime/group.h"

namespace ep {

// Time lines of the last kernels (cuda/stamps.h); empty without CUDA.
std::vector<std::vector<uint64_t>> take_time_line(bool combine);

// False in a build without CUDA.
bool has_cuda_backend();

// `config.device_index` < 0: the CPU backend, else CUDA's.
std::unique_ptr<Group> make_group(Bootstrap& bootstrap, const GroupConfig& config);

}  // namespace ep
