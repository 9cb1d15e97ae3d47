#define EP_NETWORK ::ep::GinNetwork
#define EP_NETWORK_HEADER "cuda/network/gin/gin_network.cuh"
#include "cuda/ll/links/dispatch_launch.cuh"
#include "cuda/network/gin/ll.cuh"

namespace ep {

void load_gin_dispatch() { load_rail_dispatch(); }

void launch_gin(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                void* stream) {
  if (args.peers.can_be_masked) return launch_masking_gin(args, rail, network, stream);
  launch_rail({args, rail, network}, stream);
}

}  // namespace ep
