// What a GIN library offers. NCCL's GPU-initiated networking (GIN) has device code of its own for each release, so the
// kernels that use it are compiled in shared libraries beside this one, each with the headers of one release. They see
// a process's NCCL through the functions that this library has looked up, and nothing of one crosses but this table.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ep {

// Functions of the NCCL loaded that its older headers do not declare.
struct GinNccl {
  void *comm_query_properties = nullptr, *dev_comm_create = nullptr, *dev_comm_destroy = nullptr;
};

// NCCL's names for what carries the bytes, by its numbers.
enum class GinBackend : int { kNone = 0, kProxy = 2, kGdaki = 3, kGpi = 4, kEfaGda = 5 };

struct GinProperties {
  bool has_device_api = false;
  GinBackend full = GinBackend::kNone, railed = GinBackend::kNone;  // between all ranks, between those of a rail
  int num_domains = 0;                                              // NCCL's LSA teams
};

struct GinRequest {
  int num_contexts = 1;
  int num_signals = 1;  // of each context
  int queue_depth = 0;  // operations of a context and peer under way; 0: NCCL's choice
};

struct NetworkProbeParams;
struct LlRail;
struct LinkRestartParams;
struct LlDispatchParams;
struct LlCombineParams;
struct LlCombineWeightsParams;
struct HtRail;
struct HtRouteParams;
struct HtDispatchParams;
struct HtCombineParams;
template <class Params>
struct KernelArgs;

// Functions that return text return null if all went well; else it lasts until the thread's next call.
struct GinTable {
  size_t bytes = sizeof(GinTable);
  const char* build = nullptr;  // nccl_ep's version: both libraries must be of one build
  int nccl_version = 0;         // of the headers
  uint32_t backends = 0;        // bit b: the kernels serve GinBackend b

  ncclResult_t (*query)(const GinNccl&, ncclComm_t, GinProperties*) = nullptr;
  // NCCL may write *dev_comm until a communicator that does not block is idle again. free_dev_comm() frees its memory.
  void* (*new_dev_comm)() = nullptr;
  void (*free_dev_comm)(void* dev_comm) = nullptr;
  ncclResult_t (*create)(const GinNccl&, ncclComm_t, const GinRequest&, void* dev_comm) = nullptr;
  ncclResult_t (*destroy)(const GinNccl&, ncclComm_t, const void* dev_comm) = nullptr;
  int (*num_contexts)(const void* dev_comm) = nullptr;  // those that NCCL has made

  const char* (*load_kernels)(bool masks_ranks) = nullptr;  // into the current device
  const char* (*launch_probe)(const void* dev_comm, ncclWindow_t, const NetworkProbeParams&, void* stream) = nullptr;
  const char* (*launch_restart)(const void* dev_comm, ncclWindow_t, const LinkRestartParams&, void* stream) = nullptr;
  template <class Params, class Rail = LlRail>
  using Launch = const char* (*)(const void* dev_comm, ncclWindow_t, const KernelArgs<Params>&, const Rail&,
                                 void* stream);
  Launch<LlDispatchParams> launch_dispatch = nullptr;
  Launch<LlCombineParams> launch_combine = nullptr;
  Launch<LlCombineWeightsParams> launch_combine_weights = nullptr;
  Launch<HtRouteParams, HtRail> launch_ht_route = nullptr;
  Launch<HtDispatchParams, HtRail> launch_ht_dispatch = nullptr;
  Launch<HtCombineParams, HtRail> launch_ht_combine = nullptr;

  // cuda/testing/stamps.h, of the kernels there: ht_dispatch or ht_combine.
  std::vector<std::vector<uint64_t>> (*take_stamps)(const char* kernel) = nullptr;
};

// The one symbol of a GIN library.
constexpr char kGinSymbol[] = "nccl_ep_gin_table";
using GinTableFunction = const GinTable* (*)();

}  // namespace ep
