// Counts and ids as NCCL EP's callers have them, on CUDA: one kernel, of this rank alone.
#pragma once

#include "runtime/common/layout_info.h"

namespace ep {

void load_layout_info_kernel();
void launch_layout_info(const LayoutInfoParams& params, void* stream);

}  // namespace ep
