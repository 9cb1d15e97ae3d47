#define EP_MASKS_RANKS 1
#define EP_NETWORK ::ep::GinNetwork
#define EP_NETWORK_HEADER "cuda/network/gin/gin_network.cuh"
#include "cuda/ll/links/dispatch_launch.cuh"
#include "cuda/network/gin/ll.cuh"

namespace ep {

void load_masking_gin_dispatch() { load_rail_dispatch(); }

void launch_masking_gin(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, const GinNetwork::Args& network,
                        void* stream) {
  launch_rail({args, rail, network}, stream);
}

}  // namespace ep
