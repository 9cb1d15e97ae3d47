// A GIN library: what csrc/transport/nccl/gin/table.h says, for the release of NCCL whose headers these are.
#include <string>

#include "cuda/launch/launch_util.h"
#include "cuda/network/gin/gin_network.cuh"
#include "cuda/network/gin/ht.cuh"
#include "cuda/network/gin/ll.cuh"
#include "cuda/network/probe.cuh"
#include "cuda/network/restart.cuh"
#include "cuda/testing/stamps.h"
#include "transport/nccl/gin/table.h"

namespace ep {
namespace {

static_assert(NCCL_VERSION_CODE == EP_GIN_RELEASE, "the headers of another NCCL come first");
static_assert(static_cast<int>(NCCL_GIN_TYPE_PROXY) == static_cast<int>(GinBackend::kProxy) &&
              static_cast<int>(NCCL_GIN_TYPE_GDAKI) == static_cast<int>(GinBackend::kGdaki) &&
              static_cast<int>(NCCL_GIN_TYPE_GPI) == static_cast<int>(GinBackend::kGpi));

template <class Body>
const char* error_of(Body&& body) {
  thread_local std::string text;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

ncclResult_t query(const GinNccl& nccl, ncclComm_t comm, GinProperties* properties) {
  ncclCommProperties found = NCCL_COMM_PROPERTIES_INITIALIZER;
  const auto call = reinterpret_cast<decltype(&ncclCommQueryProperties)>(nccl.comm_query_properties);
  const ncclResult_t result = call(comm, &found);
  if (result != ncclSuccess) return result;
  properties->has_device_api = found.deviceApiSupport;
  properties->full = static_cast<GinBackend>(found.ginType);
  properties->railed = static_cast<GinBackend>(found.railedGinType);
  properties->num_domains = found.nLsaTeams;
  return ncclSuccess;
}

ncclResult_t create(const GinNccl& nccl, ncclComm_t comm, const GinRequest& request, void* dev_comm) {
  ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  requirements.ginContextCount = request.num_contexts;
  requirements.ginSignalCount = request.num_signals;
  requirements.ginCounterCount = 1;  // not used: NCCL is seldom asked for none
  requirements.ginQueueDepth = request.queue_depth;
  requirements.ginStrongSignalsRequired = false;
  requirements.ginVaSignalsRequired = false;
  const auto call = reinterpret_cast<decltype(&ncclDevCommCreate)>(nccl.dev_comm_create);
  return call(comm, &requirements, static_cast<ncclDevComm*>(dev_comm));
}

ncclResult_t destroy(const GinNccl& nccl, ncclComm_t comm, const void* dev_comm) {
  const auto call = reinterpret_cast<decltype(&ncclDevCommDestroy)>(nccl.dev_comm_destroy);
  return call(comm, static_cast<const ncclDevComm*>(dev_comm));
}

GinNetwork::Args network_args(const void* dev_comm, ncclWindow_t window) {
  return {*static_cast<const ncclDevComm*>(dev_comm), window};
}

__global__ void __launch_bounds__(kProbeThreads)
    network_probe(const __grid_constant__ NetworkProbeParams params, const __grid_constant__ GinNetwork::Args network) {
  probe_network<GinNetwork>(params, network);
}

__global__ void __launch_bounds__(kRestartThreads) network_restart(const __grid_constant__ LinkRestartParams params,
                                                                   const __grid_constant__ GinNetwork::Args network) {
  restart_links<GinNetwork>(params, network);
}

const char* load_kernels(bool masks_ranks) {
  return error_of([&] {
    load_kernel(&network_probe, 0);
    if (masks_ranks) {
      load_kernel(&network_restart, 0);
      load_masking_gin_dispatch();
      load_masking_gin_combine();
    } else {
      load_gin_dispatch();
      load_gin_combine();
    }
    load_gin_ht_dispatch();
    load_gin_ht_combine();
  });
}

const char* launch_probe(const void* dev_comm, ncclWindow_t window, const NetworkProbeParams& params, void* stream) {
  return error_of([&] {
    launch_kernel(&network_probe, 1, kProbeThreads, 0, true, stream, params, network_args(dev_comm, window));
  });
}

const char* launch_restart(const void* dev_comm, ncclWindow_t window, const LinkRestartParams& params, void* stream) {
  return error_of([&] {
    launch_kernel(&network_restart, 1, kRestartThreads, 0, false, stream, params, network_args(dev_comm, window));
  });
}

template <class Params, class Rail>
const char* launch_op(const void* dev_comm, ncclWindow_t window, const KernelArgs<Params>& args, const Rail& rail,
                      void* stream) {
  return error_of([&] { launch_gin(args, rail, network_args(dev_comm, window), stream); });
}

const GinTable& table() {
  static const GinTable table = [] {
    GinTable made;
    made.build = EP_VERSION;
    made.nccl_version = NCCL_VERSION_CODE;
    made.backends = NCCL_GIN_BACKEND_MASK_ALL;
    made.query = &query;
    made.new_dev_comm = [] { return static_cast<void*>(new ncclDevComm{}); };
    made.free_dev_comm = [](void* dev_comm) { delete static_cast<ncclDevComm*>(dev_comm); };
    made.create = &create;
    made.destroy = &destroy;
    made.num_contexts = [](const void* dev_comm) {
      return static_cast<int>(static_cast<const ncclDevComm*>(dev_comm)->ginContextCount);
    };
    made.load_kernels = &load_kernels;
    made.launch_probe = &launch_probe;
    made.launch_restart = &launch_restart;
    made.launch_dispatch = &launch_op<LlDispatchParams, LlRail>;
    made.launch_combine = &launch_op<LlCombineParams, LlRail>;
    made.launch_combine_weights = &launch_op<LlCombineWeightsParams, LlRail>;
    made.launch_ht_route = &launch_op<HtRouteParams, HtRail>;
    made.launch_ht_dispatch = &launch_op<HtDispatchParams, HtRail>;
    made.launch_ht_combine = &launch_op<HtCombineParams, HtRail>;
    made.take_stamps = [](const char* kernel) { return ep::take_stamps(kernel); };
    return made;
  }();
  return table;
}

}  // namespace
}  // namespace ep

extern "C" __attribute__((visibility("default"))) const ep::GinTable* nccl_ep_gin_table() { return &ep::table(); }
