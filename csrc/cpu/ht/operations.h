// The high-throughput operations on the host.
#pragma once

#include "cpu/ht/exchange.h"
#include "runtime/ht/params.h"

namespace ep {

void cpu_ht_dispatch(const HtDispatchParams& params, Transport& transport, CpuState& state);
void cpu_ht_combine(const HtCombineParams& params, Transport& transport, CpuState& state);

// The receive part of a dispatch that sends rows: moves what lies in slots and staging rows to outputs and handle.
void place_received(const HtDispatchParams& params, HtExchange& exchange);

}  // namespace ep
