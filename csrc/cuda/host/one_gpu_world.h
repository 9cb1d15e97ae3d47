// All ranks of a world on one GPU: each rank is a thread, their windows lie side by side in one allocation, and a call
// of all ranks becomes one launch. Several launches could not do: tools such as compute-sanitizer run one kernel at a
// time, and each would wait for the others. The kernels are in a library of their own, of builds with NCCL_EP_LAB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "cuda/host/network_path.h"
#include "cuda/ht/common/geometry.h"
#include "cuda/ll/common/geometry.h"
#include "cuda/protocol/kernel_args.h"
#include "cuda/testing/stamps.h"
#include "cuda/testing/testing.h"
#include "transport/transport.h"

namespace ep {

class OneGpuWorld {
 public:
  // The device must be done with the windows.
  virtual ~OneGpuWorld() = default;

  virtual LsaPeers peers(int rank) const = 0;

  // Each returns when all ranks have called with the same kind of operation and the same stream, and it was launched.
  // What goes wrong is thrown on every rank.
  virtual void run(int rank, const KernelArgs<LlDispatchParams>& args, void* stream) = 0;
  virtual void run(int rank, const KernelArgs<LlCombineParams>& args, void* stream) = 0;
  virtual void run(int rank, const KernelArgs<LlCombineWeightsParams>& args, void* stream) = 0;
  virtual void run(int rank, const KernelArgs<HtRouteParams>& args, void* stream) = 0;
  virtual void run(int rank, const KernelArgs<HtDispatchParams>& args, void* stream) = 0;
  virtual void run(int rank, const KernelArgs<HtCombineParams>& args, void* stream) = 0;

  // Collective: between the domains that ranks claim. `config.world` is this.
  virtual std::unique_ptr<NetworkPath> make_network_path(Bootstrap& bootstrap, const NetworkConfig& config) = 0;

  virtual void set_timeout(double seconds) = 0;
  // Ranks that wait for this one give up, now and later.
  virtual void abort(int rank) = 0;
};

// Collective between threads of one process, on the current device. Throws kInvalidUsage in builds without the library.
std::shared_ptr<OneGpuWorld> join_one_gpu_world(Bootstrap& bootstrap, uint64_t window_bytes, double timeout_seconds,
                                                bool masks_ranks);

// What the library offers, which lies beside the one that loads it. Both are of one build, so objects and exceptions
// may cross.
struct OneGpuTable {
  size_t bytes = sizeof(OneGpuTable);
  const char* build = nullptr;  // nccl_ep's version
  std::shared_ptr<OneGpuWorld> (*join)(Bootstrap& bootstrap, uint64_t window_bytes, double timeout_seconds,
                                       bool masks_ranks) = nullptr;
  // Of the kernels there.
  TimeLine (*take_stamps)(std::string_view kernel) = nullptr;
#if defined(EP_HAS_DELAYS)
  void (*set_testing)(const GpuTesting& testing) = nullptr;
#endif
};

// The one symbol of the library.
constexpr char kOneGpuSymbol[] = "nccl_ep_one_gpu_table";
extern "C" const OneGpuTable* nccl_ep_one_gpu_table();

}  // namespace ep
