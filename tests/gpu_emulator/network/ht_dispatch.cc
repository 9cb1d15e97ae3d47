#define EP_NETWORK ::ep::SimulatedNetwork
#define EP_NETWORK_HEADER "cuda/network/simulated.cuh"
#include "cuda/ht/links/dispatch_launch.cuh"
#include "simulated_path.h"

namespace ep {

void load_simulated_ht_dispatch() { load_ht_rail_dispatch(); }

void launch_simulated(const KernelArgs<HtRouteParams>& args, const HtRail& rail, const SimulatedNetworkArgs& network,
                      void* stream) {
  launch_rail({args, rail, network}, stream);
}

void launch_simulated(const KernelArgs<HtDispatchParams>& args, const HtRail& rail, const SimulatedNetworkArgs& network,
                      void* stream) {
  launch_rail({args, rail, network}, stream);
}

}  // namespace ep
