// Physical experts in place of logical ones, on CUDA: one kernel, of this rank alone.
#pragma once

#include "runtime/common/expert_map.h"

namespace ep {

void load_expert_map_kernel();
void launch_expert_map(const ExpertMapParams& params, void* stream);

}  // namespace ep
