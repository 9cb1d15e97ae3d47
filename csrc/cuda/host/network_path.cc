#include "cuda/host/network_path.h"

#include "base/check.h"

#if !defined(EP_EMULATED_GPU)

namespace ep {

void require_network(const Topology& topology) {
  raise(ErrorKind::kSystem, "the ranks are in ", topology.num_domains(), " NVLink domains of ", topology.domain_size,
        ", and this build has no network for GPUs: make the buffer of one domain's ranks");
}

std::unique_ptr<NetworkPath> make_network_path(Bootstrap&, const NetworkConfig& config) {
  require_network(config.topology);
  return nullptr;
}

}  // namespace ep

#endif
