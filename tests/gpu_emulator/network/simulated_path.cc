// The simulated network as the host sees it.
#include "simulated_path.h"

#include "cuda/host/one_gpu_world.h"
#include "nic.h"
#include "transport/collective_step.h"

namespace ep {
namespace {

class SimulatedPath : public NetworkPath {
 public:
  SimulatedPath(std::shared_ptr<emulator::Nics> nics, int rank) : nics_(std::move(nics)), rank_(rank) {}

  void launch(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, void* stream) override {
    launch_simulated(args, rail, nics_->args(rank_), stream);
  }
  void launch(const KernelArgs<LlCombineParams>& args, const LlRail& rail, void* stream) override {
    launch_simulated(args, rail, nics_->args(rank_), stream);
  }
  void launch(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail, void* stream) override {
    launch_simulated(args, rail, nics_->args(rank_), stream);
  }
  void launch(const KernelArgs<HtRouteParams>& args, const HtRail& rail, void* stream) override {
    launch_simulated(args, rail, nics_->args(rank_), stream);
  }
  void launch(const KernelArgs<HtDispatchParams>& args, const HtRail& rail, void* stream) override {
    launch_simulated(args, rail, nics_->args(rank_), stream);
  }
  void launch(const KernelArgs<HtCombineParams>& args, const HtRail& rail, void* stream) override {
    launch_simulated(args, rail, nics_->args(rank_), stream);
  }
  void launch(const LinkRestartParams& params, void* stream) override {
    launch_simulated(params, nics_->args(rank_), stream);
  }
  WireBytes wire_bytes() const override { return nics_->wire_bytes(rank_); }

 private:
  std::shared_ptr<emulator::Nics> nics_;
  const int rank_;
};

}  // namespace

void require_network(Bootstrap&, NcclComm&, bool) {}

std::unique_ptr<NetworkPath> make_network_path(Bootstrap& bootstrap, const NetworkConfig& config) {
  if (config.world != nullptr) return config.world->make_network_path(bootstrap, config);
  if (config.masks_ranks) {
    load_masking_simulated_dispatch();
    load_masking_simulated_combine();
  } else {
    load_simulated_dispatch();
    load_simulated_combine();
  }
  load_simulated_ht_dispatch();
  load_simulated_ht_combine();
  auto nics = made_by_rank_0<emulator::Nics>(bootstrap,
                                             [&] { return std::make_shared<emulator::Nics>(config.window, config); });
  return std::make_unique<SimulatedPath>(std::move(nics), bootstrap.rank());
}

}  // namespace ep
