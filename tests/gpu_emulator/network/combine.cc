#define EP_NETWORK ::ep::SimulatedNetwork
#define EP_NETWORK_HEADER "cuda/network/simulated.cuh"
#include "cuda/ll/links/combine_launch.cuh"
#include "simulated_path.h"

namespace ep {

void load_simulated_combine() { load_rail_combine(); }

void launch_simulated(const KernelArgs<LlCombineParams>& args, const LlRail& rail, const SimulatedNetworkArgs& network,
                      void* stream) {
  if (args.peers.can_be_masked) return launch_masking_simulated(args, rail, network, stream);
  launch_rail({args, rail, network}, stream);
}

void launch_simulated(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail,
                      const SimulatedNetworkArgs& network, void* stream) {
  if (args.peers.can_be_masked) return launch_masking_simulated(args, rail, network, stream);
  launch_rail({args, rail, network}, stream);
}

}  // namespace ep
