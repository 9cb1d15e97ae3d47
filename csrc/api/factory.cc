#include "api/factory.h"

#include "base/check.h"
#include "cpu/backend.h"
#include "cpu/common/expert_map.h"
#include "cpu/common/layout_info.h"
#include "cpu/common/token_layout.h"
#if defined(EP_WITH_CUDA) || defined(EP_EMULATED_GPU)
#include "cuda/host/backend.h"
#include "cuda/ht/expert_map.h"
#include "cuda/ht/layout_info.h"
#include "cuda/ht/token_layout.h"
#include "cuda/testing/stamps.h"
#endif
#if defined(EP_WITH_CUDA)
#include "transport/nccl/api.h"
#include "transport/nccl/bootstrap.h"
#include "transport/nccl/gin/library.h"
#include "transport/nccl/version.h"
#endif

namespace ep {

#if !defined(EP_WITH_CUDA) && !defined(EP_EMULATED_GPU)
[[noreturn]] static void refuse_cuda() { raise(ErrorKind::kSystem, why_no_cuda()); }
#endif

std::vector<std::vector<uint64_t>> take_time_line([[maybe_unused]] std::string_view kernel) {
#if defined(EP_WITH_CUDA) || defined(EP_EMULATED_GPU)
  return take_stamps(kernel);
#else
  return {};
#endif
}

bool has_cuda_backend() { return why_no_cuda().empty(); }

std::string why_no_cuda() {
#if defined(EP_WITH_CUDA)
  return "";
#else
  return "this nccl_ep was built without CUDA (" EP_WITHOUT_CUDA
         "): build it where nvcc is, with NCCL_EP_CUDA=ON in the environment, or use device=\"cpu\"";
#endif
}

NcclInfo nccl_info() {
  NcclInfo info;
#if defined(EP_WITH_CUDA)
  info.compiled = nccl_version_name(NCCL_VERSION_CODE);
  try {
    info.loaded = nccl_version_name(nccl().version);
    info.path = nccl().path;
    const std::vector<int> releases = gin_releases();
    info.network = gin_served(releases);
    if (gin_release_for(nccl().version, releases) == 0) {
      info.network_problem = gin_version_problem(nccl().version, releases);
    }
  } catch (const Error& error) {
    info.problem = error.what();
  }
#endif
  return info;
}

std::unique_ptr<Bootstrap> bootstrap_of([[maybe_unused]] ncclComm* comm, [[maybe_unused]] int device,
                                        [[maybe_unused]] double seconds) {
#if defined(EP_WITH_CUDA)
  return bootstrap_over(comm, device, seconds);
#else
  raise(ErrorKind::kSystem, "groups of an NCCL communicator need a build with CUDA");
#endif
}

int device_of([[maybe_unused]] ncclComm* comm) {
#if defined(EP_WITH_CUDA)
  return device_of_comm(comm);
#else
  raise(ErrorKind::kSystem, "NCCL communicators need a build with CUDA");
#endif
}

void* window_address([[maybe_unused]] ncclComm* comm, [[maybe_unused]] ncclWindow_vidmem* window,
                     [[maybe_unused]] uint64_t offset) {
#if defined(EP_WITH_CUDA)
  return address_in_window(comm, window, offset);
#else
  raise(ErrorKind::kSystem, "windows of NCCL need a build with CUDA");
#endif
}

void write_layout_info(const LayoutInfoParams& params, [[maybe_unused]] bool on_gpu, [[maybe_unused]] void* stream) {
#if defined(EP_EMULATED_GPU)
  launch_layout_info(params, stream);
#elif defined(EP_WITH_CUDA)
  if (on_gpu) return launch_layout_info(params, stream);
  cpu_layout_info(params);
#else
  if (on_gpu) refuse_cuda();
  cpu_layout_info(params);
#endif
}

void token_layout(const TokenLayoutParams& params, [[maybe_unused]] bool on_gpu, [[maybe_unused]] void* stream) {
#if defined(EP_EMULATED_GPU)
  launch_token_layout(params, stream);
#elif defined(EP_WITH_CUDA)
  if (on_gpu) return launch_token_layout(params, stream);
  cpu_token_layout(params);
#else
  if (on_gpu) refuse_cuda();
  cpu_token_layout(params);
#endif
}

void map_experts(const ExpertMapParams& params, [[maybe_unused]] bool on_gpu, [[maybe_unused]] void* stream) {
#if defined(EP_EMULATED_GPU)
  launch_expert_map(params, stream);
#elif defined(EP_WITH_CUDA)
  if (on_gpu) return launch_expert_map(params, stream);
  cpu_map_experts(params);
#else
  if (on_gpu) refuse_cuda();
  cpu_map_experts(params);
#endif
}

std::unique_ptr<Group> make_group(Bootstrap& bootstrap, const GroupConfig& given) {
  GroupConfig config = given;
  Group::BackendFactory make_backend = &make_cpu_backend;
#if defined(EP_EMULATED_GPU)
  config.has_rail = true;
#elif defined(EP_WITH_CUDA)
  config.has_rail = config.device_index >= 0;
#else
  if (config.device_index >= 0) refuse_cuda();
#endif
#if defined(EP_EMULATED_GPU) || defined(EP_WITH_CUDA)
  if (config.has_rail) make_backend = &make_cuda_backend;
#endif
  return std::make_unique<Group>(bootstrap, config, make_backend);
}

}  // namespace ep
