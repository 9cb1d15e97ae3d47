#include "cuda/host/exact_sizes.h"

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/interruption.h"
#include "runtime/group.h"
#include "transport/device/check_cuda.h"
#include "transport/device/device_guard.h"

namespace ep {
namespace {

int num_sizes(const HtDispatchParams& params) { return 2 + params.output.local_experts; }

void check_not_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  EP_CUDA(cudaStreamIsCapturing(stream, &status));
  EP_CHECK(status == cudaStreamCaptureStatusNone,
           "a dispatch of exact sizes waits for the host and cannot be captured: give a capacity");
}

void make_room(Memory& memory, int count) {
  if (count <= memory.ht_sizes_count) return;
  RelaxedCapture relaxed;
  EP_CUDA(cudaFreeHost(memory.ht_sizes));
  memory.ht_sizes = nullptr;
  EP_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&memory.ht_sizes), count * sizeof(int64_t), cudaHostAllocMapped));
  memory.ht_sizes_count = count;
}

}  // namespace

void ExactSizes::prepare(HtRouteParams& routing, cudaStream_t stream) {
  check_not_capturing(stream);
  make_room(memory_, num_sizes(routing) + 1);  // the most tokens of a rank come last
  EP_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&routing.host_sizes), memory_.ht_sizes, 0));
  EP_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&routing.host_epoch), &memory_.host->ht_epoch, 0));
  epoch_before_ = std::atomic_ref(memory_.host->ht_epoch).load(std::memory_order_relaxed);
}

bool ExactSizes::have_come() const {
  return std::atomic_ref(memory_.host->ht_epoch).load(std::memory_order_acquire) != epoch_before_;
}

// The kernel has a deadline, so the host needs none. It looks at the stream once in a while: each time takes a lock of
// the driver that other threads want.
void ExactSizes::await(const HtDispatchParams& params, cudaStream_t stream) {
  constexpr int kPollsPerCheck = 4096;
  constexpr std::chrono::milliseconds kLookEvery{20};
  RelaxedCapture relaxed;
  auto next_look = std::chrono::steady_clock::now() + kLookEvery;
  for (int polls = 1; !have_come(); polls++) {
    if (polls % kPollsPerCheck != 0) continue;
    const bool looks = std::chrono::steady_clock::now() >= next_look;
    check_waiting(stream, looks);
    if (looks) next_look = std::chrono::steady_clock::now() + kLookEvery;
  }
  std::copy_n(memory_.ht_sizes, num_sizes(params), params.host_sizes);
  if (params.host_most_tokens != nullptr) *params.host_most_tokens = memory_.ht_sizes[num_sizes(params)];
}

// Whether they may still come. `looks`: also whether the caller has been interrupted.
void ExactSizes::check_waiting(cudaStream_t stream, bool looks) {
  const Failure failed = backend_.failure();
  const int rank = memory_.peers.rank;
  if (failed.code != Failure::kNone) {
    raise(failed.code == Failure::kTimeout ? ErrorKind::kTimeout : ErrorKind::kMismatch,
          describe(failed, rank, memory_.timeout_seconds));
  }
  if (is_destroyed_.load(std::memory_order_relaxed)) {
    backend_.abort();  // else this thread would free what the buffer owns only after the kernel's deadline
    raise(ErrorKind::kInvalidUsage, "the buffer was destroyed by another thread while rank ", rank,
          " waited for the sizes of a dispatch");
  }
  if (looks && has_interruption()) interrupt();
  const cudaError_t state = cudaStreamQuery(stream);
  if (state == cudaErrorNotReady || have_come()) return;
  EP_CUDA(state);
  raise(ErrorKind::kSystem, "the routing of a dispatch ended without sizes");
}

// Ctrl-C while the host waits: kernels in flight end, and the buffer has failed.
void ExactSizes::interrupt() {
  backend_.abort();
  EP_CUDA(cudaStreamSynchronize(memory_.stream));  // from now on, no kernel writes a failure of its own
  Failure& failed = memory_.host->failure;
  if (backend_.failure().code == Failure::kNone) {
    failed.awaited = Awaited::kRouting;
    failed.epoch = failed.expected = epoch_before_ + 1;
    failed.seen = epoch_before_;
    failed.is_ht = 1;
    std::atomic_ref(failed.code).store(Failure::kInterrupted, std::memory_order_release);
  }
  raise(ErrorKind::kTimeout, describe(backend_.failure(), memory_.peers.rank, memory_.timeout_seconds));
}

}  // namespace ep
