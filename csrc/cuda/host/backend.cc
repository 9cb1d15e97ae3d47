#include "cuda/host/backend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "cuda/host/exact_sizes.h"
#include "cuda/host/links.h"
#include "cuda/host/memory.h"
#include "cuda/host/one_gpu_world.h"
#include "cuda/host/setup.h"
#include "cuda/launch/launch.h"
#include "runtime/common/arch.h"
#include "transport/device/check_cuda.h"
#include "transport/device/device_guard.h"
#include "transport/nccl/window.h"

namespace ep {
namespace {

template <class Params>
constexpr bool kIsLl = std::is_same_v<Params, LlDispatchParams> || std::is_same_v<Params, LlCombineParams> ||
                       std::is_same_v<Params, LlCombineWeightsParams>;

class CudaBackend : public Backend {
 public:
  CudaBackend(std::unique_ptr<Memory> memory, const Window& window, const Topology& topology)
      : memory_(memory.release(), &tear_down),
        window_(window),
        topology_(topology),
        num_ranks_(topology.num_ranks),
        arch_(memory_->arch_of_a_rank(num_ranks_)),
        links_(*memory_, window_, topology_, arch_),
        sizes_(*memory_, *this) {
    const Region<char>& arena = window.ht.arena;
    if (arena.count == 0) return;
    arena_ = std::make_shared<Arena>(memory_->peers.local<char>(arena.offset), arena.offset, arena.count, memory_);
  }
  ~CudaBackend() override {
    if (memory_->world) memory_->world->abort(memory_->peers.rank);
  }

  const char* name() const override { return "cuda"; }
  bool has_own_times() const override { return true; }
  void dispatch(const LlDispatchParams& params, void* stream) override { run(params, stream); }
  void combine(const LlCombineParams& params, void* stream) override { run(params, stream); }
  void combine_weights(const LlCombineWeightsParams& params, void* stream) override { run(params, stream); }
  void ht_dispatch(const HtDispatchParams& given, void* stream) override {
    HtDispatchParams params = given;
    const Launch<HtDispatchParams> launch = launch_of(params, num_tokens(params), arch_for(params));
    params.chunks = launch.plan.chunks;
    if (routes(params.variant)) route(params, stream);
    if (!sends_rows(params.variant)) return;
    try {
      run(params, launch, stream);
    } catch (...) {
      if (routes(params.variant)) abort();  // else the next operation would take the counts for its own
      throw;
    }
  }
  void ht_combine(const HtCombineParams& params, void* stream) override { run(params, stream); }
  std::shared_ptr<Arena> arena() const override { return arena_; }

  void mask(int rank, void* stream) override {
    DeviceGuard guard(memory_->device);
    static_assert(Masks::kMasked == 0x0101);
    EP_CUDA(cudaMemsetAsync(&memory_->state->masks.is_masked[rank], 1, 2, static_cast<cudaStream_t>(stream)));
  }
  void update_masks(const RankMask& masked, void* stream) override {
    DeviceGuard guard(memory_->device);
    constexpr size_t kStride = sizeof *memory_->state->masks.is_masked;
    // The lowest byte of each: kMasked becomes kRecalled, and an active rank stays active.
    static_assert((Masks::kMasked & ~0xFFu) == Masks::kRecalled);
    EP_CUDA(cudaMemset2DAsync(memory_->state->masks.is_masked, kStride, 0, 1, num_ranks_,
                              static_cast<cudaStream_t>(stream)));
    for (int r = 0; r < num_ranks_; r++) {
      if (masked.has(r)) mask(r, stream);
    }
  }
  void query_masks(int32_t* status, void* stream) override {
    DeviceGuard guard(memory_->device);
    constexpr size_t kStride = sizeof *memory_->state->masks.is_masked;
    static_assert(sizeof *status == kStride);
    EP_CUDA(cudaMemsetAsync(status, 0, num_ranks_ * kStride, static_cast<cudaStream_t>(stream)));
    EP_CUDA(cudaMemcpy2DAsync(status, kStride, memory_->state->masks.is_masked, kStride, 1, num_ranks_,
                              cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
  }
  LlEpochs settle() override {
    {
      DeviceGuard guard(memory_->device);
      RelaxedCapture relaxed;
      EP_CUDA(cudaDeviceSynchronize());
    }
    const Report now = report(false);
    return {now.epochs[0], now.epochs[1]};
  }
  void restart(const LlEpochs& epochs) override {
    std::lock_guard lock(mutex_);
    DeviceGuard guard(memory_->device);
    rest_rows(*memory_, window_);
    std::vector<uint64_t> credits;  // of every rank, for each kind
    for (uint64_t epoch : epochs.of) credits.insert(credits.end(), num_ranks_, epoch);
    EP_CUDA(cudaMemcpyAsync(memory_->peers.local<char>(window_.signals.offset), credits.data(),
                            credits.size() * sizeof(uint64_t), cudaMemcpyHostToDevice, memory_->stream));
    for (int kind = 0; kind < kNumKinds; kind++) {
      EP_CUDA(cudaMemcpyAsync(&memory_->state->epoch[kind].epoch, &epochs.of[kind], sizeof(uint64_t),
                              cudaMemcpyHostToDevice, memory_->stream));
    }
    if (memory_->network && memory_->peers.can_be_masked) restart_links(epochs);
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
  }
  void unmask_all(const RankMask& there) override {
    std::vector<uint32_t> words(num_ranks_);
    for (int r = 0; r < num_ranks_; r++) words[r] = there.has(r) ? 0 : Masks::kRecalled;
    set(memory_->state->masks.is_masked, words);
  }
  void store_words(int peer, Offset offset, const std::vector<uint64_t>& words) override {
    set(memory_->peers.at<uint64_t>(peer, offset), words);
  }
  std::vector<uint64_t> load_words(Offset offset, uint64_t count) override {
    std::lock_guard lock(mutex_);
    DeviceGuard guard(memory_->device);
    std::vector<uint64_t> words(count);
    EP_CUDA(cudaMemcpyAsync(words.data(), memory_->peers.local<char>(offset), count * sizeof(uint64_t),
                            cudaMemcpyDeviceToHost, memory_->stream));
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
    return words;
  }

  void replace(Bootstrap& bootstrap, int rank, double seconds) override {
    DeviceGuard guard(memory_->device);
    replace_rank(bootstrap, *memory_, window_, rank, seconds);
  }
  void set_mask(int rank, bool is_masked) override {
    set(&memory_->state->masks.is_masked[rank], std::vector<uint32_t>{is_masked ? Masks::kMasked : 0});
  }

  WireBytes wire_bytes() const override { return memory_->network ? memory_->network->wire_bytes() : WireBytes{}; }

  std::array<int, kNumKinds> last_blocks() const override {
    std::array<int, kNumKinds> blocks{};
    for (int kind = 0; kind < kNumKinds; kind++) {
      std::visit([&](const auto& plan) { blocks[kind] = plan.blocks; }, last_plans_[kind]);
    }
    return blocks;
  }
  std::array<std::string, kNumKinds> last_plans() const override {
    std::array<std::string, kNumKinds> texts;
    for (int kind = 0; kind < kNumKinds; kind++) {
      std::visit([&](const auto& plan) { texts[kind] = plan.blocks > 0 ? describe(plan) : ""; }, last_plans_[kind]);
    }
    return texts;
  }

  Failure failure() const override {
    // Pairs with the fence before the kernel's store of the code; nothing is written after it.
    const uint32_t code = std::atomic_ref(memory_->host->failure.code).load(std::memory_order_acquire);
    return code == Failure::kNone ? Failure{} : memory_->host->failure;
  }

  bool has_failed() const override {
    return std::atomic_ref(memory_->host->failure.code).load(std::memory_order_acquire) != Failure::kNone;
  }

  bool has_invalid_ids() const override {
    return std::atomic_ref(memory_->host->has_invalid_ids).load(std::memory_order_acquire) != 0;
  }

  // Waits for a copy, not for kernels.
  Report report(bool take_invalid_ids) override {
    std::lock_guard lock(mutex_);
    DeviceGuard guard(memory_->device);
    RelaxedCapture relaxed;
    if (take_invalid_ids) std::atomic_ref(memory_->host->has_invalid_ids).store(0, std::memory_order_release);
    const DeviceState& seen = memory_->host->mirror;
    EP_CUDA(cudaMemcpyAsync(&memory_->host->mirror, memory_->state, kReportedBytes, cudaMemcpyDeviceToHost,
                            memory_->stream));
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
    Report report;
    report.failure = failure();
    report.invalid_ids = seen.diagnostics.invalid_ids;
    report.dropped_rows = seen.diagnostics.dropped_rows;
    for (int r = 0; r < num_ranks_; r++) {
      if ((seen.masks.is_masked[r] & 0xFF) != 0) report.masked.add(r);
      if (seen.masks.is_masked[r] != 0) report.left_out.add(r);
    }
    for (int kind = 0; kind < kNumKinds; kind++) {
      report.epochs[kind] = seen.epoch[kind].epoch;
      report.ht_epochs[kind] = seen.ht_epoch[kind].epoch;
      report.ht_staged[kind] = seen.ht_staged[kind];
    }
    if (take_invalid_ids && report.invalid_ids.count > 0) {
      EP_CUDA(cudaMemsetAsync(&memory_->state->diagnostics.invalid_ids, 0, sizeof(InvalidIds), memory_->stream));
      EP_CUDA(cudaStreamSynchronize(memory_->stream));
    }
    return report;
  }

  uint64_t window_word(Offset offset) override { return load_words(offset, 1)[0]; }

  void set_timeout(double seconds) override {
    std::lock_guard lock(mutex_);
    DeviceGuard guard(memory_->device);
    memory_->host->timeout_ns = nanoseconds(seconds);
    EP_CUDA(cudaMemcpyAsync(&memory_->state->failure_flag.timeout_ns, &memory_->host->timeout_ns, sizeof(uint64_t),
                            cudaMemcpyHostToDevice, memory_->stream));
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
    if (memory_->world) memory_->world->set_timeout(seconds);
    memory_->timeout_seconds = seconds;
  }

  void set_pdl(bool enabled) override { uses_pdl_ = enabled; }

  void end_waits() override {
    sizes_.end_waits();
    if (memory_->world) memory_->world->abort(memory_->peers.rank);
  }

  void abort() override {
    std::lock_guard lock(mutex_);
    if (memory_->world) memory_->world->abort(memory_->peers.rank);
    if (memory_->network) memory_->network->abort();
    if (memory_->nccl_window) memory_->nccl_window->comm().fail();
    if (failure().code != Failure::kNone) return;  // a kernel has set the word, and blocks of its call look at it
    try {
      // Every wait looks at this word, so kernels in flight end now and not at their deadline.
      DeviceGuard guard(memory_->device);
      memory_->host->has_failed = 1;
      EP_CUDA(cudaMemcpyAsync(&memory_->state->failure_flag.has_failed, &memory_->host->has_failed, sizeof(uint32_t),
                              cudaMemcpyHostToDevice, memory_->stream));
    } catch (const Error&) {  // a context that is broken runs no kernels
    }
  }

 private:
  // Memory of a GPU, at once.
  template <class T>
  void set(T* target, const std::vector<T>& values) {
    std::lock_guard lock(mutex_);
    DeviceGuard guard(memory_->device);
    EP_CUDA(cudaMemcpyAsync(target, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, memory_->stream));
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
  }

  void restart_links(const LlEpochs& epochs) {
    LinkRestartParams params;
    for (int kind = 0; kind < kNumKinds; kind++) {
      params.rails[kind] = LlRail::make(window_.rail[kind], static_cast<Kind>(kind), topology_, memory_->peers.rank, 0);
      params.epochs[kind] = epochs.of[kind];
    }
    params.peers = memory_->peers;
    params.state = memory_->state;
    const double seconds = std::max(1.0, 4 * memory_->timeout_seconds);  // ranks that have just met begin some ms apart
    params.timeout_ns = nanoseconds(seconds);
    LinkRestartResult& result = memory_->host->restart;
    result = {};
    EP_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&params.result), &result, 0));
    memory_->network->launch(params, memory_->stream);
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
    if (result.has_failed == 0) return;
    raise(ErrorKind::kTimeout, "masks are cleaned, and what rank ", result.peer, " has sent has not come within ",
          seconds, " s: ", result.seen, " of ", result.expected, " signals");
  }

  // Whether a kernel may begin before the one before it in the stream ends: it waits for that itself.
  bool overlaps_before(const LlPlan&) const { return uses_pdl_; }
  // Only if both leave SMs free: a GPU must not be full of kernels that wait for one operation of the peers.
  bool overlaps_before(const HtPlan& plan) const {
    return uses_pdl_ && plan.blocks + kHtRouteBlocks < memory_->arch.num_sms;
  }

  // The hot path: an op has set the device, and CUDA is called for the launch alone.
  template <class Params>
  void run(const Params& params, void* stream) {
    if constexpr (kIsLl<Params>) {
      if (memory_->network) {
        const LinkedLaunch<Params> how = links_.launch_of(params, num_tokens(params), arch_for(params));
        return memory_->network->launch(args_of(params, how.launch), how.rail, stream);
      }
    }
    run(params, launch_of(params, num_tokens(params), arch_for(params)), stream);
  }
  template <class Params>
  void run(const Params& params, const Launch<Params>& how, void* stream) {
    const KernelArgs<Params> args = args_of(params, how);
    if constexpr (!kIsLl<Params>) {
      if (memory_->network) return memory_->network->launch(args, links_.ht_rail_of(params), stream);
    }
    return memory_->world ? memory_->world->run(memory_->peers.rank, args, stream) : launch(args, stream);
  }

  // The routing kernel of a dispatch. If the caller asks for the sizes, the host waits for them.
  void route(const HtDispatchParams& params, void* stream) {
    HtRouteParams routing{params, memory_->ht_block_counts};
    if (params.host_sizes == nullptr) return run(routing, stream);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    sizes_.prepare(routing, cuda_stream);
    run(routing, stream);
    sizes_.await(params, cuda_stream);
  }

  template <class Params>
  KernelArgs<Params> args_of(const Params& params, const Launch<Params>& how) {
    auto args = KernelArgs<Params>::of(memory_->state, memory_->peers, num_ranks_, how.plan, how.geometry, params);
    args.plan.pdl = memory_->world == nullptr && overlaps_before(args.plan);
    constexpr bool is_dispatch =
        std::is_same_v<Params, LlDispatchParams> || std::is_base_of_v<HtDispatchParams, Params>;
    last_plans_[static_cast<int>(is_dispatch ? Kind::kDispatch : Kind::kCombine)] = args.plan;
    return args;
  }

  // That the plan is for: of all ranks of a world on one GPU, because they share a plan.
  template <class Params>
  int num_tokens(const Params& params) const {
    return memory_->world ? params.shape.max_tokens : params.num_tokens;
  }
  // With the SMs that the caller asks for, of those there are.
  template <class Params>
  Arch arch_for(const Params& params) const {
    if constexpr (requires { params.options.num_sms; }) {
      if (params.options.num_sms > 0) return arch_.with_sms(std::min(params.options.num_sms, arch_.num_sms));
    }
    return arch_;
  }

  std::shared_ptr<Memory> memory_;  // tensors of the arena keep it
  const Window window_;
  const Topology topology_;
  const int num_ranks_;
  const Arch arch_;  // the share of the GPU that this rank has
  const Links links_;
  ExactSizes sizes_;
  std::shared_ptr<Arena> arena_;
  bool uses_pdl_ = true;
  std::array<std::variant<LlPlan, HtPlan>, kNumKinds> last_plans_{LlPlan{.blocks = 0}, LlPlan{.blocks = 0}};
  std::mutex mutex_;  // of the private stream and its host block
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(Bootstrap& bootstrap, const Topology& topology, const Window& window,
                                           const GroupConfig& config) {
  return std::make_unique<CudaBackend>(set_up(bootstrap, topology, window, config), window, topology);
}

}  // namespace ep
