// The network between domains of GPUs, which both modes share.
#pragma once

namespace ep {

constexpr int kRailContexts = 4;  // of the network, for each kind

}  // namespace ep
