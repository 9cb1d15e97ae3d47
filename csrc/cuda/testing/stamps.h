// The time line of the last kernels, in builds with NCCL_EP_STAMPS.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ep {

// For each phase the time at which each warp (32 a block) passed it, in ns from the first stamp of the first phase; ~0
// if it did not. Clears them.
// Empty in other builds. `kernel`: ll_dispatch, ll_combine, ht_route, ht_dispatch or ht_combine.
std::vector<std::vector<uint64_t>> take_stamps(std::string_view kernel);

}  // namespace ep
