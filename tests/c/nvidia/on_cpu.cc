// A CUDA runtime and an NCCL of CPU ranks, as far as the unit tests and programs of nccl-extensions use them: device
// memory is the host's, streams are done at once, a communicator is ncclEpxCommFromCallback's over memory that the
// processes share. tests/c/test_nvidia_tests.py and test_nvidia_programs_on_cpu.py link it into each.
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>
#include <nccl_device.h>
#include <nccl_epx.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <random>
#include <string>

#include "meeting.h"

template <class Function>
Function next_of(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// ---- CUDA

extern "C" {

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 511) / 256 * 256);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  if (bytes > 0) std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132 : 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{1} << 40;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// An event is a time of the host's clock.
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new std::chrono::steady_clock::time_point);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<std::chrono::steady_clock::time_point*>(event) = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  const auto at = [](cudaEvent_t event) { return *reinterpret_cast<std::chrono::steady_clock::time_point*>(event); };
  *ms = std::chrono::duration<float, std::milli>(at(to) - at(from)).count();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<std::chrono::steady_clock::time_point*>(event);
  return cudaSuccess;
}

// There are no graphs.
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaErrorNotSupported; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }

// ---- NCCL

namespace {

int world_size = 0;

int32_t gather(void* context, const void* mine, void* all, size_t bytes, uint64_t timeout_ns) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  return static_cast<Member*>(context)->gather(mine, all, bytes, end) ? 0 : NCCL_EPX_TIMEOUT;
}

}  // namespace

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::snprintf(id->internal, sizeof id->internal, "/ep_tests_%d_%u", getpid(), std::random_device{}());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  Member* member = Member::join(id.internal, rank, num_ranks);
  if (member == nullptr) return ncclSystemError;
  world_size = num_ranks;
  return ncclEpxCommFromCallback(comm, rank, num_ranks, NCCL_EPX_DEVICE_CPU, &gather, member);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclEpxCommDestroy(comm); }
const char* ncclGetErrorString(ncclResult_t) { return ncclEpxGetLastError(); }

ncclTeam_t ncclTeamLsa(ncclComm_t) { return {world_size, 0, 1}; }

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  return cudaMalloc(memory, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclMemFree(void* memory) {
  std::free(memory);
  return ncclSuccess;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t, void* memory, size_t, ncclWindow_t* window, int) {
  *window = static_cast<ncclWindow_t>(memory);
  return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }

// ---- Windows: of the host's memory, whose address NCCL finds

namespace {

class Windows {
 public:
  explicit Windows(std::initializer_list<ncclEpTensor_t*> tensors) {
    for (ncclEpTensor_t* tensor : tensors) {
      if (tensor == nullptr || tensor->data != nullptr || tensor->win_hdl == nullptr) continue;
      tensor->data = reinterpret_cast<char*>(tensor->win_hdl) + tensor->win_offset;
      found_[count_++] = tensor;
    }
  }
  ~Windows() {
    for (int i = 0; i < count_; i++) found_[i]->data = nullptr;
  }

 private:
  ncclEpTensor_t* found_[8];
  int count_ = 0;
};

}  // namespace

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* in, const ncclEpDispatchOutputs_t* out,
                            const ncclEpLayoutInfo_t* info, const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
  static const auto next = next_of(&ncclEpDispatch, "ncclEpDispatch");
  if (in == nullptr || out == nullptr) return next(handle, in, out, info, config, stream);
  const Windows windows({in->tokens, in->topk_weights, in->scales, out->tokens, out->topk_weights, out->scales});
  return next(handle, in, out, info, config, stream);
}

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* in, const ncclEpCombineOutputs_t* out,
                           const ncclEpCombineConfig_t* config, cudaStream_t stream) {
  static const auto next = next_of(&ncclEpCombine, "ncclEpCombine");
  if (in == nullptr || out == nullptr) return next(handle, in, out, config, stream);
  const Windows windows({in->tokens, in->topk_weights, out->tokens, out->topk_weights});
  return next(handle, in, out, config, stream);
}

}  // extern "C"
