#define EP_NETWORK ::ep::GinNetwork
#define EP_NETWORK_HEADER "cuda/network/gin/gin_network.cuh"
#include "cuda/ht/links/dispatch_launch.cuh"
#include "cuda/network/gin/ht.cuh"

namespace ep {

void load_gin_ht_dispatch() { load_ht_rail_dispatch(); }

void launch_gin(const KernelArgs<HtRouteParams>& args, const HtRail& rail, const GinNetwork::Args& network,
                void* stream) {
  launch_rail({args, rail, network}, stream);
}

void launch_gin(const KernelArgs<HtDispatchParams>& args, const HtRail& rail, const GinNetwork::Args& network,
                void* stream) {
  launch_rail({args, rail, network}, stream);
}

}  // namespace ep
