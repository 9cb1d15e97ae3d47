// The low-latency operations on the host.
#pragma once

#include "cpu/common/state.h"
#include "runtime/ll/params.h"

namespace ep {

void cpu_dispatch(const LlDispatchParams& params, Transport& transport, CpuState& state);
void cpu_combine(const LlCombineParams& params, Transport& transport, CpuState& state);
void cpu_combine_weights(const LlCombineWeightsParams& params, Transport& transport, CpuState& state);

// The benchmark's floors. They exist to be tested: their time on the host means nothing.
void cpu_floor_flags(const LlFloorFlagsParams& params, Transport& transport, CpuState& state);
void cpu_floor_push(const LlFloorPushParams& params, Transport& transport, CpuState& state);

}  // namespace ep
