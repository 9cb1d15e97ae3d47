// Physical experts in place of logical ones, on the host.
#pragma once

#include "runtime/common/expert_map.h"

namespace ep {

// Throws kInvalidUsage at an id that is no expert, or an expert without a replica, before anything is written.
void cpu_map_experts(const ExpertMapParams& params);

}  // namespace ep
