#include "cuda/host/setup.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "cuda/host/gpu_identity.h"
#include "cuda/host/one_gpu_world.h"
#include "cuda/launch/launch.h"
#include "runtime/agreement.h"
#include "transport/collective_step.h"
#include "transport/device/check_cuda.h"
#include "transport/device/device_guard.h"
#include "transport/nccl/api.h"
#include "transport/nccl/version.h"
#include "transport/nccl/window.h"

namespace ep {
namespace {

constexpr double kMinSetupSeconds = 60;  // NCCL's start takes seconds, however short the deadline of operations

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
  EP_CHECK(!config.uses_cumem, "window is \"cumem\", and the ranks are in ", topology.num_domains(),
           " NVLink domains: windows of cuMem serve one machine");
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
  memory.peers.first = static_cast<uint16_t>(topology.domain_of(bootstrap.rank()) * topology.domain_size);
  memory.peers.size = static_cast<uint16_t>(topology.domain_size);
  memory.peers.link_size = static_cast<uint16_t>(window.rail[0].link_size);
  memory.network =
      make_network_path(bootstrap, {topology, shape, window.rail[0].link_size, memory.peers.local<char>(0),
                                    window.bytes, memory.peers.stride, config.timeout_seconds, memory.nccl_window.get(),
                                    memory.world, config.masks_late_ranks, config.network_seed});
}

void make_window(Bootstrap& bootstrap, Memory& memory, const Topology& topology, uint64_t bytes,
                 const GpuIdentity& identity, const GroupConfig& config) {
  const bool is_on_one_gpu = is_world_on_one_gpu(bootstrap, identity);
  if (config.is_elastic || (config.uses_cumem && bootstrap.num_ranks() > 1)) {
    EP_CHECK_USAGE(!is_on_one_gpu || bootstrap.num_ranks() == 1, "all ranks use one GPU, ", identity.address,
                   ": those whose windows are of cuMem have one each");
    const double seconds = std::max(config.timeout_seconds, kMinSetupSeconds);
    memory.cumem_window = std::make_unique<CumemWindow>(bootstrap, memory.device, topology.num_ranks, bytes, seconds);
    memory.peers = memory.cumem_window->peers();
  } else if (bootstrap.num_ranks() == 1) {
    EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory.own_window), bytes));
    memory.peers = {memory.own_window, bytes, 0};
  } else if (is_on_one_gpu) {
    memory.world = join_one_gpu_world(bootstrap, bytes, config.timeout_seconds, config.masks_late_ranks);
    memory.peers = memory.world->peers(bootstrap.rank());
  } else {
    make_nccl_window(bootstrap, memory, topology, bytes, config);
  }
}

// As clean_window(), but for the credits. If the new rank does not come to the end, this one goes on behind its last
// operation, and the next one waits for the credits of that.
void clean_window_but_credits(const Memory& memory, const LlWindow& window) {
  std::vector<uint64_t> credits(window.signals.count);
  const uint64_t bytes = credits.size() * sizeof(uint64_t);
  char* const at = memory.peers.local<char>(window.signals.offset);
  EP_CUDA(cudaMemcpyAsync(credits.data(), at, bytes, cudaMemcpyDeviceToHost, memory.stream));
  EP_CUDA(cudaStreamSynchronize(memory.stream));
  clean_window(memory, window);
  EP_CUDA(cudaMemcpyAsync(at, credits.data(), bytes, cudaMemcpyHostToDevice, memory.stream));
  EP_CUDA(cudaStreamSynchronize(memory.stream));
}

}  // namespace

// The steps of set_up() for a rank that joins.
void replace_rank(Bootstrap& bootstrap, Memory& memory, const Window& window, int rank, double seconds) {
  GpuIdentity identity{};
  on_all_ranks(bootstrap, [&] {
    identity = own_gpu_identity(memory.device);
    clean_window_but_credits(memory, window);
  });
  is_world_on_one_gpu(bootstrap, identity);
  memory.cumem_window->replace(bootstrap, rank, seconds);
  on_all_ranks(bootstrap, [] {});
}

std::unique_ptr<Memory> set_up(Bootstrap& bootstrap, const Topology& topology, const Window& window,
                               const GroupConfig& config) {
  check_domains(topology, config);
  int device = config.device_index;
  GpuIdentity identity{};
  std::optional<DeviceGuard> guard;
  std::unique_ptr<Memory> memory;
  on_all_ranks(bootstrap, [&] {
    if (device < 0) EP_CUDA(cudaGetDevice(&device));
    guard.emplace(device);
    identity = own_gpu_identity(device);
    load_kernels({config.has_ll(), config.has_ht(), config.masks_late_ranks});
    memory = make_memory(device, config.timeout_seconds, window.ht.message_words, topology.num_domains() > 1);
  });
  make_window(bootstrap, *memory, topology, window.bytes, identity, config);
  if (topology.num_domains() > 1) join_network(bootstrap, topology, window, config, *memory);
  // No rank writes into a window before its owner has cleaned it.
  on_all_ranks(bootstrap, [&] {
    // Of the world: where a rank joins, those who meet may be fewer.
    if (config.masks_late_ranks) set_up_masks(*memory, window, topology.num_ranks);
    clean_window(*memory, window);
  });
  return memory;
}

}  // namespace ep
