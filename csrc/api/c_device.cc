#include "api/c_device.h"

#include <cstdint>
#include <cstdlib>

#include "base/check.h"
#include "base/math.h"
#if defined(EP_WITH_CUDA)
#include "transport/device/device_guard.h"
#endif

namespace ep::c {

#if defined(EP_WITH_CUDA)

ScopedDevice::ScopedDevice(int device) {
  if (device < 0) return;
  int current = 0;
  EP_CUDA(cudaGetDevice(&current));
  if (current == device) return;
  EP_CUDA(cudaSetDevice(device));
  previous_ = current;
}

ScopedDevice::~ScopedDevice() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

#else

ScopedDevice::ScopedDevice(int) {}
ScopedDevice::~ScopedDevice() = default;

#endif

bool is_capturing([[maybe_unused]] int device, [[maybe_unused]] void* stream) {
#if defined(EP_WITH_CUDA)
  if (device >= 0) {
    cudaStreamCaptureStatus status;
    EP_CUDA(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

void synchronize([[maybe_unused]] int device, [[maybe_unused]] void* stream) {
#if defined(EP_WITH_CUDA)
  if (device >= 0) EP_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
#endif
}

void* allocate([[maybe_unused]] int device, size_t bytes) {
  EP_CHECK(bytes <= PTRDIFF_MAX, bytes, " bytes were asked for, at most ", PTRDIFF_MAX);
  void* memory = nullptr;
#if defined(EP_WITH_CUDA)
  if (device >= 0) {
    DeviceGuard guard(device);
    EP_CUDA(cudaMalloc(&memory, bytes));
    return memory;
  }
#endif
  memory = std::aligned_alloc(64, align_up<size_t>(bytes, 64));
  if (memory == nullptr) raise(ErrorKind::kSystem, "no memory: ", bytes, " bytes were asked for");
  return memory;
}

void release([[maybe_unused]] int device, void* memory) noexcept {
#if defined(EP_WITH_CUDA)
  if (device >= 0) {
    try {
      DeviceGuard guard(device);
      cudaFree(memory);
    } catch (const Error&) {  // the context is gone, and its memory with it
    }
    return;
  }
#endif
  std::free(memory);
}

}  // namespace ep::c
