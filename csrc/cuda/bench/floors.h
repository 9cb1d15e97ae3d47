// Launching the floors of the benchmark: csrc/cuda/bench/floors.cuh.
#pragma once

#include "cuda/launch/launch.h"

namespace ep {

// The blocks and warps that would send in a dispatch of `tokens` tokens on `num_sms` blocks, and nothing else.
LlPlan plan_of(const LlFloorPushParams& params, int tokens, int num_sms);
LlPlan plan_of(const LlFloorFlagsParams& params);

// Refuses what these kernels cannot serve, with the values.
void check_served(const LlFloorPushParams& params);
void check_served(const LlFloorFlagsParams& params);

void load_floor_kernels();
void launch(const KernelArgs<LlFloorPushParams>& args, void* stream);
void launch(const KernelArgs<LlFloorFlagsParams>& args, void* stream);

}  // namespace ep
