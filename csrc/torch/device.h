// Where a group's tensors live, and on which stream its operations run.
#pragma once

#include <ATen/ATen.h>

#include "runtime/group.h"

namespace ep {

at::Device device_of(const Group& group);
void* current_stream(const at::Device& device);  // a cudaStream_t; null on the CPU

}  // namespace ep
