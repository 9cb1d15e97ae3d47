// The time line of the last kernels, in builds with NCCL_EP_LAB.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ep {

// For each phase the time at which each warp passed it, in ns from the first stamp of the first phase; ~0 if it did
// not. Warps are those of rank 0, 32 a block. In the emulator those of the next ranks follow, on the same clock.
using TimeLine = std::vector<std::vector<uint64_t>>;

// Clears the stamps. Empty in other builds. `kernel`: ll_dispatch, ll_combine, ht_route, ht_dispatch or ht_combine; of
// its sets (device/kernel_set.cuh) the one that has run.
TimeLine take_stamps(std::string_view kernel);

// Every file of kernels has stamps of its own, and tells this list how they are read.
using StampsReader = TimeLine (*)();
bool add_stamps_reader(const char* kernel, StampsReader reader);

}  // namespace ep
