// What a buffer owns on a GPU: its state, its window, a stream and pinned memory.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "cuda/host/cumem_window.h"
#include "cuda/host/network_path.h"
#include "cuda/host/one_gpu_world.h"
#include "cuda/protocol/device_state.h"
#include "layout/ll/offsets.h"
#include "runtime/common/arch.h"
#include "transport/device/lsa_peers.h"
#include "transport/nccl/window.h"

namespace ep {

inline uint64_t nanoseconds(double seconds) { return static_cast<uint64_t>(std::min(seconds, 1e9) * 1e9); }

// Pinned, so that the host reads it while the GPU is busy, and the GPU writes it.
struct HostBlock {
  Failure failure;     // kernels write its code last, with a system fence before
  DeviceState mirror;  // of the last report
  uint64_t timeout_ns;
  uint32_t has_failed;
  uint64_t ht_epoch;  // of the last dispatch of exact sizes
  LinkRestartResult restart;
  uint32_t has_invalid_ids;  // kernels set it
};

struct Memory {
  int device = 0;
  Arch arch;  // of all of the GPU
  std::atomic<double> timeout_seconds{0};
  int64_t* ht_sizes = nullptr;  // pinned: of a dispatch of exact sizes, as HtDispatchParams says
  int ht_sizes_count = 0;
  uint64_t* ht_block_counts = nullptr;  // as HtRouteParams says
  cudaStream_t stream = nullptr;        // non-blocking: never waits for the caller's kernels
  HostBlock* host = nullptr;
  DeviceState* state = nullptr;
  LsaPeers peers;
  // The window, one of four.
  char* own_window = nullptr;  // a world of one rank
  std::shared_ptr<OneGpuWorld> world;
  std::unique_ptr<NcclWindow> nccl_window;
  std::unique_ptr<CumemWindow> cumem_window;
  std::unique_ptr<NetworkPath> network;  // between the window and those of other domains

  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  // On the right device, which is idle. At the end of a process CUDA may be gone: errors mean nothing here.
  ~Memory() {
    network.reset();
    nccl_window.reset();
    cumem_window.reset();
    world.reset();
    cudaFree(own_window);
    cudaFree(state);
    cudaFree(ht_block_counts);
    cudaFreeHost(host);
    cudaFreeHost(ht_sizes);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }

  // In a world on one GPU a launch holds the blocks of all ranks, and maybe that of the NIC.
  Arch arch_of_a_rank(int num_ranks) const {
    return world ? arch.with_sms(std::max((arch.num_sms - (network ? 1 : 0)) / num_ranks, 1)) : arch;
  }
};

// Frees what a buffer owns once the GPU is idle. After the deadline the work is left to a thread of its own, and what
// cannot be freed safely is left to the end of the process: a caller never hangs here.
void tear_down(Memory* owned) noexcept;
// `message_words`: of an op message of high throughput, which has the counts of a rank; 0 without high throughput.
std::unique_ptr<Memory> make_memory(int device, double timeout_seconds, uint64_t message_words, bool has_domains);
// kAbsent, where nothing has arrived.
void rest_rows(const Memory& memory, const LlWindow& window);
// Where ranks can be masked: what the kernels need for it.
void set_up_masks(Memory& memory, const LlWindow& window, int num_ranks);
void clean_window(const Memory& memory, const LlWindow& window);

}  // namespace ep
