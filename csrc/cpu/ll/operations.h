// The low-latency operations on the host.
#pragma once

#include "cpu/common/state.h"
#include "runtime/ll/params.h"

namespace ep {

void cpu_dispatch(const LlDispatchParams& params, Transport& transport, CpuState& state);
void cpu_combine(const LlCombineParams& params, Transport& transport, CpuState& state);
void cpu_combine_weights(const LlCombineWeightsParams& params, Transport& transport, CpuState& state);

}  // namespace ep
