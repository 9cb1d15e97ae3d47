// The time line of the last kernels, in builds with EP_STAMPS.
#pragma once

#include <cstdint>
#include <vector>

namespace ep {

// For each phase the time at which each warp (32 a block) passed it, in ns from the first stamp of the first phase; ~0
// if it did not. Clears them.
// Empty in other builds. `combine`: of the combine kernel, else of dispatch; `ht`: of high throughput.
std::vector<std::vector<uint64_t>> take_stamps(bool combine, bool ht);

}  // namespace ep
