#include "cuda/host/memory.h"

#include <chrono>
#include <future>
#include <new>
#include <thread>

#include "cuda/launch/launch.h"
#include "layout/common/wire.h"
#include "transport/device/check_cuda.h"

namespace ep {
namespace {

constexpr double kTearDownSlackSeconds = 10;  // beyond the deadline that ends the last kernel

// Of a buffer's state. Counters are for kMaxRanks: those that no kernel of the buffer uses, at its end, are not there.
constexpr size_t state_bytes(bool has_ht, bool has_domains) {
  if (has_domains) return sizeof(DeviceState);
  return has_ht ? offsetof(DeviceState, ht_rail_counters) : kReportedBytes;
}

Arch arch_of(int device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    EP_CUDA(cudaDeviceGetAttribute(&value, which, device));
    return value;
  };
  return {.compute = attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor),
          .num_sms = attribute(cudaDevAttrMultiProcessorCount),
          .shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
}

}  // namespace

void tear_down(Memory* owned) noexcept {
  const double seconds = owned->timeout_seconds + kTearDownSlackSeconds;
  try {
    std::promise<void> promise;
    std::future<void> done = promise.get_future();
    std::thread thread([owned, promise = std::move(promise)]() mutable {
      if (cudaSetDevice(owned->device) == cudaSuccess) {
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        cudaThreadExchangeStreamCaptureMode(&mode);
        if (cudaDeviceSynchronize() == cudaSuccess) delete owned;
      }
      promise.set_value();
    });
    if (done.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready) {
      thread.join();
    } else {
      thread.detach();
    }
  } catch (const std::exception&) {  // no thread can be made
  }
}

std::unique_ptr<Memory> make_memory(int device, double timeout_seconds, uint64_t message_words, bool has_domains) {
  auto memory = std::make_unique<Memory>();
  memory->device = device;
  memory->timeout_seconds = timeout_seconds;
  memory->arch = arch_of(device);
  EP_CUDA(cudaStreamCreateWithFlags(&memory->stream, cudaStreamNonBlocking));
  EP_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&memory->host), sizeof(HostBlock), cudaHostAllocMapped));
  new (memory->host) HostBlock{};
  const size_t bytes_of_state = state_bytes(message_words > 0, has_domains);
  EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory->state), bytes_of_state));
  if (message_words > 0) {
    const uint64_t bytes = kHtRouteBlocks * message_words * sizeof(uint64_t);
    EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory->ht_block_counts), bytes));
    EP_CUDA(cudaMemsetAsync(memory->ht_block_counts, 0, bytes, memory->stream));
  }
  DeviceState& initial = memory->host->mirror;
  initial.failure_flag.timeout_ns = nanoseconds(timeout_seconds);
  EP_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&initial.failure), &memory->host->failure, 0));
  EP_CUDA(
      cudaHostGetDevicePointer(reinterpret_cast<void**>(&initial.has_invalid_ids), &memory->host->has_invalid_ids, 0));
  EP_CUDA(cudaMemcpyAsync(memory->state, &initial, bytes_of_state, cudaMemcpyHostToDevice, memory->stream));
  EP_CUDA(cudaStreamSynchronize(memory->stream));
  return memory;
}

void rest_rows(const Memory& memory, const LlWindow& window) {
  for (const LlWindow::PerKind& kind : window.kind) {
    EP_CUDA(cudaMemsetAsync(memory.peers.local<char>(kind.rows.offset), 0xFF, kind.rows.count * sizeof(uint32_t),
                            memory.stream));
  }
}

void set_up_masks(Memory& memory, const LlWindow& window, int num_ranks) {
  Masks& masks = memory.host->mirror.masks;
  masks.num_ranks = num_ranks;
  masks.stride = memory.peers.stride;
  for (int kind = 0; kind < kNumKinds; kind++) {
    masks.headers[kind] = memory.peers.local<uint64_t>(window.kind[kind].headers.offset);
  }
  masks.heartbeats = memory.peers.local<uint64_t>(window.heartbeats.offset);
  memory.peers.can_be_masked = true;
  EP_CUDA(cudaMemcpyAsync(&memory.state->masks, &masks, sizeof masks, cudaMemcpyHostToDevice, memory.stream));
}

void clean_window(const Memory& memory, const LlWindow& window) {
  EP_CUDA(cudaMemsetAsync(memory.peers.local<char>(0), 0, window.bytes, memory.stream));
  rest_rows(memory, window);
  EP_CUDA(cudaStreamSynchronize(memory.stream));
}

}  // namespace ep
