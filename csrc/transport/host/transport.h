// Transports over host memory. Peers of the same domain are reached by loads and stores; the others over a simulated
// network, which delays and reorders whatever the contract leaves open.
#pragma once

#include <memory>

#include "transport/host/window.h"
#include "transport/transport.h"

namespace ep {

// `network_seed` chooses the delays and the order of the simulated network; 0: in order and at once.
std::unique_ptr<Transport> make_host_transport(std::unique_ptr<HostWindows> windows, const Topology& topology,
                                               uint64_t network_seed);

}  // namespace ep
