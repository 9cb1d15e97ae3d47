// Between GPUs of several domains: NCCL's GIN.
#include "cuda/host/network_path.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "cuda/host/one_gpu_world.h"
#include "cuda/testing/stamps.h"
#include "transport/nccl/gin/comm.h"
#include "transport/nccl/window.h"

namespace ep {
namespace {

constexpr double kMinConnectSeconds = 60;  // NCCL connects in seconds, however short the deadline of operations

class GinPath : public NetworkPath {
 public:
  GinPath(Bootstrap& bootstrap, const NetworkConfig& config)
      : window_(config.nccl_window->get()),
        gin_(bootstrap, config.nccl_window->shared_comm(), {config.shape.num_contexts, config.shape.num_signals},
             std::max(config.timeout_seconds, kMinConnectSeconds)) {}

  void launch(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, void* stream) override {
    check(gin_library().launch_dispatch(gin_.dev_comm(), window_, args, rail, stream));
  }
  void launch(const KernelArgs<LlCombineParams>& args, const LlRail& rail, void* stream) override {
    check(gin_library().launch_combine(gin_.dev_comm(), window_, args, rail, stream));
  }
  void launch(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail, void* stream) override {
    check(gin_library().launch_combine_weights(gin_.dev_comm(), window_, args, rail, stream));
  }
  void launch(const KernelArgs<HtRouteParams>& args, const HtRail& rail, void* stream) override {
    check(gin_library().launch_ht_route(gin_.dev_comm(), window_, args, rail, stream));
  }
  void launch(const KernelArgs<HtDispatchParams>& args, const HtRail& rail, void* stream) override {
    check(gin_library().launch_ht_dispatch(gin_.dev_comm(), window_, args, rail, stream));
  }
  void launch(const KernelArgs<HtCombineParams>& args, const HtRail& rail, void* stream) override {
    check(gin_library().launch_ht_combine(gin_.dev_comm(), window_, args, rail, stream));
  }
  void launch(const LinkRestartParams& params, void* stream) override {
    check(gin_library().launch_restart(gin_.dev_comm(), window_, params, stream));
  }

 private:
  static void check(const char* problem) {
    if (problem != nullptr) raise(ErrorKind::kSystem, problem);
  }

  ncclWindow_t window_;
  GinComm gin_;
};

// Of the library's kernels, once it is loaded.
void add_time_lines() {
  [[maybe_unused]] static const bool are_added =
      add_stamps_reader("ht_dispatch", [] { return gin_library().take_stamps("ht_dispatch"); }) &&
      add_stamps_reader("ht_combine", [] { return gin_library().take_stamps("ht_combine"); });
}

}  // namespace

void require_network(Bootstrap& bootstrap, NcclComm& comm, bool masks_ranks) {
  require_gin(bootstrap, comm, masks_ranks);
}

std::unique_ptr<NetworkPath> make_network_path(Bootstrap& bootstrap, const NetworkConfig& config) {
  if (config.world != nullptr) return config.world->make_network_path(bootstrap, config);
  auto path = std::make_unique<GinPath>(bootstrap, config);
  add_time_lines();
  return path;
}

}  // namespace ep
