#include "cuda/host/backend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/interruption.h"
#include "cuda/host/gpu_identity.h"
#include "cuda/host/memory.h"
#include "cuda/host/one_gpu_world.h"
#include "cuda/launch/launch_util.h"
#include "layout/common/block_formats.h"
#include "runtime/agreement.h"
#include "transport/collective_step.h"
#include "transport/device/device_guard.h"
#include "transport/nccl/api.h"
#include "transport/nccl/version.h"
#include "transport/nccl/window.h"

namespace ep {
namespace {

constexpr double kMinSetupSeconds = 60;  // NCCL's start takes seconds, however short the deadline of operations

class CudaBackend : public Backend {
 public:
  CudaBackend(std::unique_ptr<Memory> memory, const Window& window, const Topology& topology)
      : memory_(memory.release(), &tear_down), window_(window), topology_(topology), num_ranks_(topology.num_ranks) {
    const Region<char>& arena = window.ht.arena;
    if (arena.count == 0) return;
    arena_ = std::make_shared<Arena>(memory_->peers.local<char>(arena.offset), arena.offset, arena.count, memory_);
  }
  ~CudaBackend() override {
    if (memory_->world) memory_->world->abort(memory_->peers.rank);
  }

  const char* name() const override { return "cuda"; }
  void dispatch(const LlDispatchParams& params, void* stream) override { run(params, stream); }
  void combine(const LlCombineParams& params, void* stream) override { run(params, stream); }
  void combine_weights(const LlCombineWeightsParams& params, void* stream) override { run(params, stream); }
  void ht_dispatch(const HtDispatchParams& given, void* stream) override {
    HtDispatchParams params = given;
    const Launch<HtDispatchParams> launch = launch_for(params);
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
    EP_CUDA(cudaMemsetAsync(&memory_->state->masks.is_masked[rank], 1, 1, static_cast<cudaStream_t>(stream)));
  }
  void query_masks(int32_t* status, void* stream) override {
    DeviceGuard guard(memory_->device);
    static_assert(sizeof *status == sizeof *memory_->state->masks.is_masked);
    EP_CUDA(cudaMemcpyAsync(status, memory_->state->masks.is_masked, num_ranks_ * sizeof *status,
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
  void unmask_all() override {
    std::lock_guard lock(mutex_);
    DeviceGuard guard(memory_->device);
    EP_CUDA(
        cudaMemsetAsync(memory_->state->masks.is_masked, 0, sizeof memory_->state->masks.is_masked, memory_->stream));
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
  }

  WireBytes wire_bytes() const override { return memory_->network ? memory_->network->wire_bytes() : WireBytes{}; }

  std::array<int, kNumKinds> last_blocks() const override { return last_blocks_; }

  Failure failure() const override {
    // Pairs with the fence before the kernel's store of the code; nothing is written after it.
    const uint32_t code = std::atomic_ref(memory_->host->failure.code).load(std::memory_order_acquire);
    return code == Failure::kNone ? Failure{} : memory_->host->failure;
  }

  // Waits for a copy, not for kernels.
  Report report(bool take_invalid_ids) override {
    std::lock_guard lock(mutex_);
    DeviceGuard guard(memory_->device);
    const DeviceState& seen = memory_->host->mirror;
    EP_CUDA(cudaMemcpyAsync(&memory_->host->mirror, memory_->state, sizeof(DeviceState), cudaMemcpyDeviceToHost,
                            memory_->stream));
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
    Report report;
    report.failure = failure();
    report.invalid_ids = seen.diagnostics.invalid_ids;
    report.dropped_rows = seen.diagnostics.dropped_rows;
    for (int r = 0; r < kMaxCudaRanks; r++) {
      if (seen.masks.is_masked[r] != 0) report.masked |= 1ull << r;
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

  uint64_t window_word(Offset offset) override {
    std::lock_guard lock(mutex_);
    DeviceGuard guard(memory_->device);
    uint64_t word = 0;
    EP_CUDA(cudaMemcpyAsync(&word, memory_->peers.local<char>(offset), sizeof word, cudaMemcpyDeviceToHost,
                            memory_->stream));
    EP_CUDA(cudaStreamSynchronize(memory_->stream));
    return word;
  }

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
    is_destroyed_ = true;
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
    return uses_pdl_ && plan.blocks + kHtRouteBlocks < memory_->num_sms;
  }

  // The hot path: an op has set the device, and CUDA is called for the launch alone.
  template <class Params>
  void run(const Params& params, void* stream) {
    run(params, launch_for(params), stream);
  }

  template <class Params>
  static constexpr bool kIsLl = std::is_same_v<Params, LlDispatchParams> || std::is_same_v<Params, LlCombineParams> ||
                                std::is_same_v<Params, LlCombineWeightsParams>;

  template <class Params>
  RailPlan rail_plan(const Params& params, const LlRail& rail, int num_sms) const {
    RailSizes sizes{rail.others(), rail.row_channels, params.shape.max_tokens, rail.row_bytes};
    if constexpr (std::is_same_v<Params, LlDispatchParams>) {
      sizes.sends_rows = sends(params.phase);
      sizes.forwards_routing = receives(params.phase);
      sizes.forwards_rows = receives(params.phase) && !rail.places_rows;
    } else if constexpr (std::is_same_v<Params, LlCombineParams>) {
      sizes.adds_up = receives(params.phase);
      sizes.ends_early = ends_early(rail, num_sms);
    }
    const RailPlan plan = plan_rail(sizes, num_sms);
    return sizes.shares_work() ? tuned("EP_PLAN_R", plan) : plan;
  }

  // But for its blocks.
  template <class Params>
  LlRail rail_of(const Params& params) const {
    constexpr Kind kind = std::is_same_v<Params, LlDispatchParams> ? Kind::kDispatch : Kind::kCombine;
    int row_bytes = scalar_row_bytes(params.shape.topk);
    if constexpr (std::is_same_v<Params, LlDispatchParams>) {
      row_bytes = params.row.wire_bytes();
    } else if constexpr (std::is_same_v<Params, LlCombineParams>) {
      row_bytes = wire_row_bytes(params.options.wire_dtype, params.hidden);  // sums cross, whatever params.row is
    }
    const RailRegions& regions = window_.rail[static_cast<int>(kind)];
    LlRail rail = LlRail::make(regions, kind, topology_, memory_->peers.rank, row_bytes);
    const bool is_for_one = rail.link_size == 1 && !memory_->peers.can_be_masked;
    if constexpr (std::is_same_v<Params, LlDispatchParams>) rail.places_rows = is_for_one;
    if constexpr (std::is_same_v<Params, LlCombineParams>) {
      rail.adds_rows = is_for_one && params.phase == Phase::kFused;
    }
    const auto need = static_cast<uint64_t>(params.shape.max_tokens) * row_bytes;
    EP_CHECK(need <= rail.rows_bytes, params.shape.max_tokens, " rows of ", row_bytes,
             " bytes do not fit the network's part of the window, ", rail.rows_bytes, " bytes", room_for_rows(kind));
    EP_CHECK(rail.share(params.shape.max_tokens) <= kMaxRailShare, "max_tokens is ", params.shape.max_tokens,
             ", low latency over several NVLink domains serves ", kMaxRailShare * rail.row_channels,
             rail.has_domain_sums() || memory_->peers.can_be_masked
                 ? ""
                 : " in the mesh: make the buffer for the rail (ll_network)");
    return rail;
  }
  template <class Params>
  LlRail rail_of(const Params& params, const LlPlan& plan) const {
    LlRail rail = rail_of(params);
    const RailPlan blocks = rail_plan(params, rail, num_blocks(params, own_sms()));
    rail.send_blocks = blocks.send_blocks;
    rail.forward_blocks = blocks.forward_blocks;
    rail.sum_blocks = blocks.sum_blocks;
    rail.share_channels(blocks.parts);
    if constexpr (requires { params.phase; }) rail.sums_at = params.phase == Phase::kFused ? plan.sender_blocks : 0;
    return rail;
  }

  template <class Params>
  Launch<Params> launch_for(const Params& params) const {
    const int blocks = num_blocks(params, own_sms());
    const int tokens = memory_->world ? params.shape.max_tokens : params.num_tokens;  // of all ranks: they share a plan
    if constexpr (kIsLl<Params>) {
      if (memory_->network) return launch_between_domains(params, tokens, blocks);
    }
    return launch_of(params, tokens, blocks);
  }
  // Receivers begin where blocks of the rail have ended: the launch has more blocks than SMs. Where `num_sms` are what
  // is wanted, or all ranks share the GPU, it must not.
  bool ends_early(const LlRail& rail, int num_sms) const {
    return rail.adds_rows && memory_->world == nullptr && num_sms == own_sms();
  }
  template <class Params>
  Launch<Params> launch_between_domains(const Params& params, int tokens, int blocks) const {
    const LlRail rail = rail_of(params);
    const int others = blocks - rail_plan(params, rail, blocks).blocks();
    if constexpr (std::is_same_v<Params, LlCombineParams>) {
      if (rail.adds_rows) {
        check_served(params);
        LlPlan plan = plan_of(params, tokens, std::max(ends_early(rail, blocks) ? blocks : others, 2));
        plan.sender_blocks = plan.receiver_block0 =
            std::max(plan.sender_blocks * (topology_.domain_size - 1) / (num_ranks_ - 1), 1);
        Launch<Params> how{plan, geometry_of(params, plan)};
        how.geometry.send_inside(plan, topology_.domain_size);
        return how;
      }
    }
    Launch<Params> how = launch_of(params, tokens, std::max(others, 2));
    if constexpr (std::is_same_v<Params, LlDispatchParams>) {  // a rank alone in its domain sends no row inside
      if (topology_.domain_size == 1 && params.phase == Phase::kFused) how.geometry.send_units = 0;
    }
    return how;
  }
  // In a world on one GPU a launch holds the blocks of all ranks, and maybe that of the NIC.
  int own_sms() const {
    if (memory_->world == nullptr) return memory_->num_sms;
    return (memory_->num_sms - (memory_->network ? 1 : 0)) / num_ranks_;
  }

  template <class Params>
  void run(const Params& params, const Launch<Params>& how, void* stream) {
    KernelArgs<Params> args = args_of(params);
    args.plan = how.plan;
    args.geometry = how.geometry;
    args.plan.pdl = memory_->world == nullptr && overlaps_before(args.plan);
    launch_over(params, args, stream);
    constexpr bool is_dispatch =
        std::is_same_v<Params, LlDispatchParams> || std::is_base_of_v<HtDispatchParams, Params>;
    last_blocks_[static_cast<int>(is_dispatch ? Kind::kDispatch : Kind::kCombine)] = args.plan.blocks;
  }

  template <class Params>
  void launch_over(const Params& params, const KernelArgs<Params>& args, void* stream) {
    if (memory_->network == nullptr) {
      return memory_->world ? memory_->world->run(memory_->peers.rank, args, stream) : launch(args, stream);
    }
    if constexpr (kIsLl<Params>) {
      memory_->network->launch(args, rail_of(params, args.plan), stream);
    } else {
      memory_->network->launch(args, ht_rail_of(params), stream);
    }
  }

  template <class Params>
  HtRail ht_rail_of(const Params& params) const {
    constexpr Kind kind = std::is_same_v<Params, HtCombineParams> ? Kind::kCombine : Kind::kDispatch;
    const int route_bytes = kind == Kind::kDispatch ? params.offsets.route.bytes_with_token() : 0;
    return HtRail::make(window_.ht, kind, topology_, memory_->peers.rank, params.shape, params.offsets.row,
                        route_bytes);
  }

  // The routing kernel of a dispatch. If the caller asks for the sizes, the host waits for them.
  void route(const HtDispatchParams& params, void* stream) {
    HtRouteParams routing{params, memory_->ht_block_counts};
    if (params.host_sizes == nullptr) return run(routing, stream);
    const int count = 2 + params.output.local_experts;  // and the most tokens of a rank behind them
    check_not_capturing(static_cast<cudaStream_t>(stream));
    make_room_for_sizes(count + 1);
    EP_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&routing.host_sizes), memory_->ht_sizes, 0));
    EP_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&routing.host_epoch), &memory_->host->ht_epoch, 0));
    const uint64_t before = std::atomic_ref(memory_->host->ht_epoch).load(std::memory_order_relaxed);
    run(routing, stream);
    await_sizes(before, static_cast<cudaStream_t>(stream));
    std::copy_n(memory_->ht_sizes, count, params.host_sizes);
    if (params.host_most_tokens != nullptr) *params.host_most_tokens = memory_->ht_sizes[count];
  }

  // The kernel has a deadline, so the host needs none. It looks at the stream once in a while: each time takes a lock
  // of the driver that other threads want.
  void await_sizes(uint64_t before, cudaStream_t stream) {
    constexpr int kPollsPerCheck = 4096;
    constexpr std::chrono::milliseconds kLookEvery{20};
    RelaxedCapture relaxed;
    std::atomic_ref epoch(memory_->host->ht_epoch);
    auto next_look = std::chrono::steady_clock::now() + kLookEvery;
    for (int polls = 1; epoch.load(std::memory_order_acquire) == before; polls++) {
      if (polls % kPollsPerCheck != 0) continue;
      const Failure failed = failure();
      if (failed.code != Failure::kNone) {
        raise(failed.code == Failure::kTimeout ? ErrorKind::kTimeout : ErrorKind::kMismatch,
              describe(failed, memory_->peers.rank, memory_->timeout_seconds));
      }
      if (is_destroyed_.load(std::memory_order_relaxed)) {
        abort();  // else this thread would free what the buffer owns only after the kernel's deadline
        raise(ErrorKind::kInvalidUsage, "the buffer was destroyed by another thread while rank ", memory_->peers.rank,
              " waited for the sizes of a dispatch");
      }
      if (std::chrono::steady_clock::now() >= next_look) {
        if (has_interruption()) interrupt(before);
        next_look = std::chrono::steady_clock::now() + kLookEvery;
      }
      const cudaError_t state = cudaStreamQuery(stream);
      if (state == cudaErrorNotReady || epoch.load(std::memory_order_acquire) != before) continue;
      EP_CUDA(state);
      raise(ErrorKind::kSystem, "the routing of a dispatch ended without sizes");
    }
  }

  // Ctrl-C while the host waits for sizes: kernels in flight end, and the buffer has failed.
  [[noreturn]] void interrupt(uint64_t before) {
    abort();
    EP_CUDA(cudaStreamSynchronize(memory_->stream));  // from now on, no kernel writes a failure of its own
    Failure& failed = memory_->host->failure;
    if (failure().code == Failure::kNone) {
      failed.awaited = Awaited::kRouting;
      failed.epoch = failed.expected = before + 1;
      failed.seen = before;
      failed.is_ht = 1;
      std::atomic_ref(failed.code).store(Failure::kInterrupted, std::memory_order_release);
    }
    raise(ErrorKind::kTimeout, describe(failure(), memory_->peers.rank, memory_->timeout_seconds));
  }

  static void check_not_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EP_CUDA(cudaStreamIsCapturing(stream, &status));
    EP_CHECK(status == cudaStreamCaptureStatusNone,
             "a dispatch of exact sizes waits for the host and cannot be captured: give a capacity");
  }

  void make_room_for_sizes(int count) {
    if (count <= memory_->ht_sizes_count) return;
    RelaxedCapture relaxed;
    EP_CUDA(cudaFreeHost(memory_->ht_sizes));
    memory_->ht_sizes = nullptr;
    EP_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&memory_->ht_sizes), count * sizeof(int64_t), cudaHostAllocMapped));
    memory_->ht_sizes_count = count;
  }

  template <class Params>
  KernelArgs<Params> args_of(const Params& params) const {
    return KernelArgs<Params>::of(memory_->state, memory_->peers, num_ranks_, params);
  }

  // Blocks that the caller asks for, of those there are.
  template <class Params>
  static int num_blocks(const Params& params, int available) {
    available = std::max(available, 1);
    if constexpr (requires { params.options.num_sms; }) {
      if (params.options.num_sms > 0) return std::min(params.options.num_sms, available);
    }
    return available;
  }

  std::shared_ptr<Memory> memory_;  // tensors of the arena keep it
  const Window window_;
  const Topology topology_;
  const int num_ranks_;
  std::shared_ptr<Arena> arena_;
  bool uses_pdl_ = true;
  std::atomic<bool> is_destroyed_{false};
  std::array<int, kNumKinds> last_blocks_{};
  std::mutex mutex_;  // of the private stream and its host block
};

void make_nccl_window(Bootstrap& bootstrap, Memory& memory, const Topology& topology, uint64_t bytes,
                      const GroupConfig& config) {
  const double seconds = std::max(config.timeout_seconds, kMinSetupSeconds);
  ncclComm* const given = config.nccl_comm;
  std::string version;
  on_all_ranks(bootstrap, [&] { version = nccl_version_name(nccl().version); });
  Agreement agreement;
  agreement.add("the version of NCCL that is loaded", version);
  agreement.check(bootstrap);
  std::shared_ptr<NcclComm> comm = given != nullptr ? NcclComm::borrow(bootstrap, given, memory.device)
                                                    : NcclComm::agree(bootstrap, memory.device, seconds);
  if (topology.num_domains() > 1) require_network(bootstrap, *comm, config.masks_late_ranks);
  memory.nccl_window = std::make_unique<NcclWindow>(bootstrap, std::move(comm), topology, bytes, seconds);
  memory.peers = memory.nccl_window->peers();
}

void check_domains(const Topology& topology, const GroupConfig& config) {
  if (topology.num_domains() == 1) return;
  EP_CHECK(topology.num_ranks <= kMaxCudaRanks, topology.num_ranks, " ranks in ", topology.num_domains(),
           " NVLink domains: GPUs serve ", kMaxCudaRanks);
  const bool has_rail = config.ll_network == LlNetwork::kRail && topology.domain_size > 1;
  EP_CHECK(!config.masks_late_ranks || !has_rail, "late ranks cannot be masked over the rail between ",
           topology.num_domains(),
           " NVLink domains, where a rank is reached through another: take the mesh (ll_network)");
}

void join_network(Bootstrap& bootstrap, const Topology& topology, const Window& window, const GroupConfig& config,
                  Memory& memory) {
  const bool has_ht = window.ht.message_words > 0;  // high throughput shares the contexts
  const NetworkShape shape{LlRail::num_contexts(),
                           LlRail::num_signals(topology) + (has_ht ? HtRail::num_signals(topology.num_domains()) : 0),
                           LlRail::max_outstanding(config.masks_late_ranks) + (has_ht ? HtRail::max_outstanding() : 0)};
  memory.peers.first = static_cast<uint8_t>(topology.domain_of(bootstrap.rank()) * topology.domain_size);
  memory.peers.size = static_cast<uint8_t>(topology.domain_size);
  memory.peers.link_size = static_cast<uint8_t>(window.rail[0].link_size);
  memory.network =
      make_network_path(bootstrap, {topology, shape, window.rail[0].link_size, memory.peers.local<char>(0),
                                    window.bytes, memory.peers.stride, config.timeout_seconds, memory.nccl_window.get(),
                                    memory.world, config.masks_late_ranks, config.network_seed});
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(Bootstrap& bootstrap, const Topology& topology, const Window& window,
                                           const GroupConfig& config) {
  check_domains(topology, config);
  int device = config.device_index;
  GpuIdentity seat{};
  std::optional<DeviceGuard> guard;
  std::unique_ptr<Memory> memory;
  on_all_ranks(bootstrap, [&] {
    if (device < 0) EP_CUDA(cudaGetDevice(&device));
    guard.emplace(device);
    seat = own_gpu_identity(device);
    load_kernels(config.masks_late_ranks);
    memory = make_memory(device, config.timeout_seconds, window.ht.message_words);
  });
  const bool is_on_one_gpu = is_world_on_one_gpu(bootstrap, seat);
  if (bootstrap.num_ranks() == 1) {
    EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory->own_window), window.bytes));
    memory->peers = {memory->own_window, window.bytes, 0};
  } else if (is_on_one_gpu) {
    memory->world = OneGpuWorld::join(bootstrap, window.bytes, config.timeout_seconds);
    memory->peers = memory->world->peers(bootstrap.rank());
  } else {
    make_nccl_window(bootstrap, *memory, topology, window.bytes, config);
  }
  if (topology.num_domains() > 1) join_network(bootstrap, topology, window, config, *memory);
  // No rank writes into a window before its owner has cleaned it.
  on_all_ranks(bootstrap, [&] {
    if (config.masks_late_ranks) set_up_masks(*memory, window, bootstrap.num_ranks());
    clean_window(*memory, window);
  });
  return std::make_unique<CudaBackend>(std::move(memory), window, topology);
}

}  // namespace ep
