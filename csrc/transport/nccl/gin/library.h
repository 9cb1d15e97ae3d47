// Finds the GIN library for the NCCL that the process has loaded. Its files lie beside this one, and are named after
// the release of NCCL that they were compiled with: libnccl_ep_gin_2.30.7.so.
#pragma once

#include <vector>

#include "transport/nccl/gin/releases.h"
#include "transport/nccl/gin/table.h"

namespace ep {

const char* gin_backend_name(GinBackend backend);

// Loaded at the first call. Throws kSystem with one sentence, which says what to install.
const GinTable& gin_library();
const GinNccl& gin_nccl();
// Releases whose libraries lie beside this one.
std::vector<int> gin_releases();

}  // namespace ep
