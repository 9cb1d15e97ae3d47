// Delays and planted bugs of the kernels, in builds with NCCL_EP_LAB. In others they fold to nothing, and in kernels
// over GIN, whose library the setters do not reach.
#pragma once

#if defined(EP_LAB) && !defined(EP_GIN_RELEASE)
#define EP_HAS_DELAYS 1

#include <cstdint>
#include <string>
#include <vector>

namespace ep {

// What the kernels of a GPU do from their next launch on.
struct GpuTesting {
  uint64_t seed = 0;       // of the delays; 0: none
  uint32_t bugs = 0;       // bit b: Bug b is planted
  uint32_t kinds = ~0u;    // bit k: in operations of Kind k
  uint32_t percent = 100;  // of the delays' usual length
  uint32_t barriers = 0;   // 1: where a flag in shared memory hands something on, a barrier does too
};

// The GPU must be idle. Throws kInvalidArgument for a name that is none: bugs are called as in base/testing.h,
// "one_bank" and so on.
void set_gpu_testing(int device, const GpuTesting& testing);
void set_on_current_gpu(const GpuTesting& testing);
uint32_t bugs_named(const std::vector<std::string>& names);

// Every file of kernels has a copy of the state, and tells this list how it is set.
using GpuTestingSetter = void (*)(const GpuTesting& testing);
bool add_gpu_testing_setter(GpuTestingSetter setter);

}  // namespace ep

#endif
