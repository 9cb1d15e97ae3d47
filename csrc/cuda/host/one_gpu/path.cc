// Between the domains that ranks on one GPU claim: a NIC block in each launch.
#include <cuda_runtime_api.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/check.h"
#include "cuda/host/one_gpu/launches.h"
#include "cuda/host/one_gpu/world.h"
#include "transport/collective_step.h"
#include "transport/device/check_cuda.h"

namespace ep {

namespace {

// The NIC of all ranks, in device memory.
class Nic {
 public:
  explicit Nic(const NetworkConfig& config)
      : num_ranks_(config.topology.num_ranks), num_signals_(config.shape.num_signals) {
    EP_CHECK(num_ranks_ <= OneGpuNic::kMaxNicRanks, num_ranks_,
             " ranks of several domains on one GPU, its network serves ", OneGpuNic::kMaxNicRanks);
    words_ = static_cast<size_t>(config.shape.num_contexts) * num_signals_;
    EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&queues_), num_ranks_ * sizeof(NicQueue)));
    EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&signals_), num_ranks_ * words_ * sizeof(uint64_t)));
    EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&nic_), sizeof(OneGpuNic)));
    EP_CUDA(cudaMemsetAsync(queues_, 0, num_ranks_ * sizeof(NicQueue), nullptr));
    EP_CUDA(cudaMemsetAsync(signals_, 0, num_ranks_ * words_ * sizeof(uint64_t), nullptr));
    const auto made = std::make_unique<OneGpuNic>();
    made->first_window = config.window;
    made->window_stride = config.window_stride;
    made->window_bytes = config.window_bytes;
    made->queues = queues_;
    made->signals = signals_;
    made->num_ranks = num_ranks_;
    made->domain_size = config.topology.domain_size;
    made->link_size = config.link_size;
    made->num_contexts = config.shape.num_contexts;
    made->num_signals = num_signals_;
    made->random = config.seed;
    EP_CUDA(cudaMemcpyAsync(nic_, made.get(), sizeof(OneGpuNic), cudaMemcpyHostToDevice, nullptr));
    EP_CUDA(cudaStreamSynchronize(nullptr));
  }
  // The device is done with it.
  ~Nic() {
    cudaFree(nic_);
    cudaFree(signals_);
    cudaFree(queues_);
  }
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  OneGpuNetworkArgs args(int rank) const { return {{queues_ + rank, signals_ + rank * words_, num_signals_}, nic_}; }
  // Of launches that have ended: waits for those under way.
  WireBytes wire_bytes(int rank) const {
    const auto seen = std::make_unique<OneGpuNic>();
    EP_CUDA(cudaDeviceSynchronize());
    EP_CUDA(cudaMemcpyAsync(seen.get(), nic_, sizeof(OneGpuNic), cudaMemcpyDeviceToHost, nullptr));
    EP_CUDA(cudaStreamSynchronize(nullptr));
    EP_CHECK(seen->problem == OneGpuNic::kNone, "the NIC has met a descriptor that is wrong, problem ", seen->problem);
    WireBytes bytes;
    for (auto* each : {&bytes.rows, &bytes.row_bytes, &bytes.other_bytes}) each->assign(num_ranks_, 0);
    bytes.network_puts.assign(seen->puts[rank], seen->puts[rank] + num_ranks_);
    bytes.network_bytes.assign(seen->bytes[rank], seen->bytes[rank] + num_ranks_);
    return bytes;
  }

 private:
  const int num_ranks_, num_signals_;
  size_t words_ = 0;
  NicQueue* queues_ = nullptr;
  uint64_t* signals_ = nullptr;
  OneGpuNic* nic_ = nullptr;
};

class OneGpuPath : public NetworkPath {
 public:
  OneGpuPath(std::shared_ptr<World> world, std::shared_ptr<Nic> nic, int rank)
      : world_(std::move(world)), nic_(std::move(nic)), rank_(rank) {}

  void launch(const KernelArgs<LlDispatchParams>& args, const LlRail& rail, void* stream) override {
    run_on_one_gpu(*world_, args, rail, nic_->args(rank_), stream);
  }
  void launch(const KernelArgs<LlCombineParams>& args, const LlRail& rail, void* stream) override {
    run_on_one_gpu(*world_, args, rail, nic_->args(rank_), stream);
  }
  void launch(const KernelArgs<LlCombineWeightsParams>& args, const LlRail& rail, void* stream) override {
    run_on_one_gpu(*world_, args, rail, nic_->args(rank_), stream);
  }
  void launch(const KernelArgs<HtRouteParams>& args, const HtRail& rail, void* stream) override {
    run_on_one_gpu(*world_, args, rail, nic_->args(rank_), stream);
  }
  void launch(const KernelArgs<HtDispatchParams>& args, const HtRail& rail, void* stream) override {
    run_on_one_gpu(*world_, args, rail, nic_->args(rank_), stream);
  }
  void launch(const KernelArgs<HtCombineParams>& args, const HtRail& rail, void* stream) override {
    run_on_one_gpu(*world_, args, rail, nic_->args(rank_), stream);
  }
  void launch(const LinkRestartParams&, void*) override {}  // there are no masks
  WireBytes wire_bytes() const override { return nic_->wire_bytes(rank_); }

 private:
  std::shared_ptr<World> world_;
  std::shared_ptr<Nic> nic_;
  const int rank_;
};

}  // namespace

std::unique_ptr<NetworkPath> World::make_network_path(Bootstrap& bootstrap, const NetworkConfig& config) {
  on_all_ranks(bootstrap, [&] {
    EP_CHECK(!config.masks_ranks, "late ranks cannot be masked in ", config.topology.num_domains(),
             " domains that ranks on one GPU claim: make the buffer without masks (enable_shrink)");
    load_crossing_dispatch();
    load_crossing_combine();
    load_crossing_ht_dispatch();
    load_crossing_ht_combine();
  });
  auto nic = made_by_rank_0<Nic>(bootstrap, [&] { return std::make_shared<Nic>(config); });
  return std::make_unique<OneGpuPath>(std::static_pointer_cast<World>(config.world), std::move(nic), bootstrap.rank());
}

}  // namespace ep
