// The launchers of the simulated network, between its files.
#pragma once

#include "cuda/ht/common/geometry.h"
#include "cuda/ll/common/geometry.h"
#include "cuda/network/restart.h"
#include "cuda/network/simulated.h"
#include "cuda/protocol/kernel_args.h"
#include "layout/ht/rail.h"
#include "layout/ll/rail.h"

namespace ep {

void load_simulated_dispatch();
void load_simulated_combine();
void load_simulated_ht_dispatch();
void load_simulated_ht_combine();
void launch_simulated(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, const SimulatedNetworkArgs& network,
                      void* stream);
void launch_simulated(const KernelArgs<LlCombineParams>& args, const LlRail& rail, const SimulatedNetworkArgs& network,
                      void* stream);
void launch_simulated(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail,
                      const SimulatedNetworkArgs& network, void* stream);

void load_masking_simulated_dispatch();
void load_masking_simulated_combine();
void launch_masking_simulated(const KernelArgs<LlDispatchParams>& args, const LlRail& rail,
                              const SimulatedNetworkArgs& network, void* stream);
void launch_masking_simulated(const KernelArgs<LlCombineParams>& args, const LlRail& rail,
                              const SimulatedNetworkArgs& network, void* stream);
void launch_masking_simulated(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail,
                              const SimulatedNetworkArgs& network, void* stream);
void launch_simulated(const LinkRestartParams& params, const SimulatedNetworkArgs& network, void* stream);

void launch_simulated(const KernelArgs<HtRouteParams>& args, const HtRail& rail, const SimulatedNetworkArgs& network,
                      void* stream);
void launch_simulated(const KernelArgs<HtDispatchParams>& args, const HtRail& rail, const SimulatedNetworkArgs& network,
                      void* stream);
void launch_simulated(const KernelArgs<HtCombineParams>& args, const HtRail& rail, const SimulatedNetworkArgs& network,
                      void* stream);

}  // namespace ep
