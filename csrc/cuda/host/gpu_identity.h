// The GPU of each rank: ranks are threads of one process on one GPU, or each has a GPU of its own.
#pragma once

#include <cstdint>

#include "transport/process.h"
#include "transport/transport.h"

namespace ep {

struct GpuIdentity {
  ProcessIdentity process;
  char gpu[16];      // its UUID
  char address[16];  // on the PCI bus, for the reader
};

GpuIdentity own_gpu_identity(int device);

// True if all ranks are threads of one process on one GPU. Throws if ranks share a GPU in any other way, unless they
// may. Collective.
bool is_world_on_one_gpu(Bootstrap& bootstrap, const GpuIdentity& mine);

}  // namespace ep
