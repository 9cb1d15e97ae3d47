#define EP_NETWORK ::ep::GinNetwork
#define EP_NETWORK_HEADER "cuda/network/gin/gin_network.cuh"
#include "cuda/ll/links/combine_launch.cuh"
#include "cuda/network/gin/ll.cuh"

namespace ep {

void load_gin_combine() { load_rail_combine(); }

void launch_gin(const KernelArgs<LlCombineParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                void* stream) {
  if (args.peers.can_be_masked) return launch_masking_gin(args, rail, network, stream);
  launch_rail({args, rail, network}, stream);
}

void launch_gin(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                void* stream) {
  if (args.peers.can_be_masked) return launch_masking_gin(args, rail, network, stream);
  launch_rail({args, rail, network}, stream);
}

}  // namespace ep
