// How operations of GPUs in several domains are launched: with kernels that know a network. Which network that is, is
// decided where the library is built; each has an implementation of this.
#pragma once

#include <memory>

#include "cuda/ht/common/geometry.h"
#include "cuda/network/network.h"
#include "cuda/network/restart.h"
#include "cuda/protocol/kernel_args.h"
#include "layout/ht/rail.h"
#include "layout/ll/rail.h"
#include "runtime/backend.h"
#include "transport/transport.h"

namespace ep {

class NcclComm;
class NcclWindow;
class OneGpuWorld;

class NetworkPath {
 public:
  virtual ~NetworkPath() = default;

  // Behind the kernels of one domain in the launch's arguments comes what the network needs.
  virtual void launch(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, void* stream) = 0;
  virtual void launch(const KernelArgs<LlCombineParams>& args, const LlRail& rail, void* stream) = 0;
  virtual void launch(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail, void* stream) = 0;

  virtual void launch(const KernelArgs<HtRouteParams>& args, const HtRail& rail, void* stream) = 0;
  virtual void launch(const KernelArgs<HtDispatchParams>& args, const HtRail& rail, void* stream) = 0;
  virtual void launch(const KernelArgs<HtCombineParams>& args, const HtRail& rail, void* stream) = 0;

  // Where ranks can be masked: while masks are cleaned, with no operation in flight on any rank.
  virtual void launch(const LinkRestartParams& params, void* stream) = 0;

  // What this rank has put into the windows of each other.
  virtual WireBytes wire_bytes() const { return {}; }
  // Gives up: no peer is waited for.
  virtual void abort() {}
};

// What a network is made for.
struct NetworkConfig {
  Topology topology;
  NetworkShape shape;
  int link_size = 1;       // ranks of different domains send to each other if their places differ by a multiple of it
  char* window = nullptr;  // the own one
  uint64_t window_bytes = 0;
  uint64_t window_stride = 0;  // of a network that reaches the windows of all ranks by addresses, from one to the next
  double timeout_seconds = 0;
  NcclWindow* nccl_window = nullptr;   // of GPUs in processes
  std::shared_ptr<OneGpuWorld> world;  // of ranks that claim domains on one GPU
  bool masks_ranks = false;            // low latency has kernels of its own for that
  uint64_t seed = 0;                   // of a simulated network; 0: what is sent lands at once and in order
};

// Collective, before a window is made on the communicator. Throws kSystem on all ranks where there is no network for
// GPUs between its domains, with what to do about it.
void require_network(Bootstrap& bootstrap, NcclComm& comm, bool masks_ranks);
// Collective.
std::unique_ptr<NetworkPath> make_network_path(Bootstrap& bootstrap, const NetworkConfig& config);

}  // namespace ep
