// The CUDA runtime of the emulator, and what stands for NCCL. Every host thread that does not choose has a GPU of its
// own; with NCCL_EP_EMULATOR_GPUS=1 they share one.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>

#include "base/math.h"
#include "transport/collective_step.h"
#include "transport/device/check_cuda.h"
#include "transport/nccl/window.h"

namespace {

// Device memory begins as garbage.
cudaError_t allocate(void** memory, size_t bytes) {
  *memory = ::operator new (bytes, std::align_val_t{256}, std::nothrow);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xA5, bytes);
  return cudaSuccess;
}
cudaError_t release(void* memory) {
  ::operator delete (memory, std::align_val_t{256});
  return cudaSuccess;
}

thread_local int own_device = -1;

int next_device() {
  static const char* text = std::getenv("NCCL_EP_EMULATOR_GPUS");
  static std::atomic<int> next = 0;
  return text != nullptr && std::string_view(text) == "1" ? 0 : next++;
}

}  // namespace

const char* cudaGetErrorName(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorNotReady";
}
const char* cudaGetErrorString(cudaError_t) { return "of the emulator"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  if (own_device < 0) own_device = next_device();
  *device = own_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  own_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::snprintf(properties->uuid.bytes, sizeof properties->uuid.bytes, "emulated %d", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, bytes, "emulated %d", device);
  return cudaSuccess;
}
// As sm_90, but for the SMs. Tests choose these, and the shared memory of a block.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const auto chosen = [](const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::atoi(text) : otherwise;
  };
  if (attribute == cudaDevAttrMultiProcessorCount) {
    *value = chosen("NCCL_EP_EMULATOR_SMS", 4);
  } else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) {
    *value = chosen("NCCL_EP_EMULATOR_SHARED_KB", 227) * 1024;
  } else {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  }
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) { return allocate(memory, bytes); }
cudaError_t cudaFree(void* memory) { return release(memory); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return allocate(memory, bytes); }
cudaError_t cudaFreeHost(void* memory) { return release(memory); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  std::memset(target, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++) {
    std::memcpy(static_cast<char*>(target) + row * target_pitch, static_cast<const char*>(source) + row * source_pitch,
                width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemset2DAsync(void* target, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
  for (size_t row = 0; row < height; row++) std::memset(static_cast<char*>(target) + row * pitch, value, width);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

namespace ep {

NcclWindow::NcclWindow(Bootstrap& bootstrap, std::shared_ptr<NcclComm> comm, const Topology&, uint64_t bytes, double)
    : comm_(std::move(comm)) {
  const uint64_t stride = align_up<uint64_t>(bytes, 4096);
  memory_ = made_by_rank_0<void>(bootstrap, [&] {
    void* memory = nullptr;
    EP_CUDA(cudaMalloc(&memory, stride * bootstrap.num_ranks()));
    return std::shared_ptr<void>(memory, &cudaFree);
  });
  peers_ = {static_cast<char*>(memory_.get()), stride, bootstrap.rank()};
}

}  // namespace ep
