#define EP_NETWORK ::ep::SimulatedNetwork
#define EP_NETWORK_HEADER "cuda/network/simulated.cuh"
#include "cuda/ht/links/combine_launch.cuh"
#include "simulated_path.h"

namespace ep {

void load_simulated_ht_combine() { load_ht_rail_combine(); }

void launch_simulated(const KernelArgs<HtCombineParams>& args, const HtRail& rail, const SimulatedNetworkArgs& network,
                      void* stream) {
  launch_rail({args, rail, network}, stream);
}

}  // namespace ep
