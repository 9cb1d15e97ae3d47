#include "cuda/network/restart.cuh"

#include "cuda/launch/launch_util.h"
#include "cuda/network/simulated.cuh"
#include "simulated_path.h"

namespace ep {
namespace {

__global__ void __launch_bounds__(kRestartThreads)
    network_restart(const __grid_constant__ LinkRestartParams params,
                    const __grid_constant__ SimulatedNetworkArgs network) {
  restart_links<SimulatedNetwork>(params, network);
}

}  // namespace

void launch_simulated(const LinkRestartParams& params, const SimulatedNetworkArgs& network, void* stream) {
  launch_kernel(&network_restart, 1, kRestartThreads, 0, false, stream, params, network);
}

}  // namespace ep
