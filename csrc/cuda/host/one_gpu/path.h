// Between the domains that ranks on one GPU claim: a NIC block in each launch. In builds for tests.
#pragma once

#include <memory>

#include "cuda/host/network_path.h"
#include "transport/transport.h"

namespace ep {

// Collective. `config.world` is the ranks'.
std::unique_ptr<NetworkPath> make_one_gpu_path(Bootstrap& bootstrap, const NetworkConfig& config);

}  // namespace ep
