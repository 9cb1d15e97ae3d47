// A CUDA runtime and an NCCL of CPU ranks, as far as the unit tests of nccl-extensions use them: device memory is the
// host's, streams are done at once, a communicator is ncclEpxCommFromCallback's over memory that the processes share.
// tests/c/test_nvidia_tests.py links it into each test.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <nccl_epx.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <random>
#include <string>
#include <thread>

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
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }

// ---- NCCL

namespace {

constexpr int kMostRanks = 16, kChunk = 4096;

struct Meeting {
  std::atomic<int> present;
  std::atomic<unsigned> round;
  char mine[kMostRanks][kChunk];
};
struct Member {
  Meeting* meeting;
  int rank, num_ranks;

  bool meet(std::chrono::steady_clock::time_point end) {
    const unsigned round = meeting->round;
    if (meeting->present.fetch_add(1) + 1 == num_ranks) {
      meeting->present = 0;
      meeting->round++;
      return true;
    }
    while (meeting->round == round) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }
};

int32_t gather(void* context, const void* mine, void* all, size_t bytes, uint64_t timeout_ns) {
  auto* member = static_cast<Member*>(context);
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  for (size_t at = 0; at < bytes; at += kChunk) {
    const size_t size = bytes - at < kChunk ? bytes - at : kChunk;
    std::memcpy(member->meeting->mine[member->rank], static_cast<const char*>(mine) + at, size);
    if (!member->meet(end)) return NCCL_EPX_TIMEOUT;
    for (int r = 0; r < member->num_ranks; r++) {
      std::memcpy(static_cast<char*>(all) + r * bytes + at, member->meeting->mine[r], size);
    }
    if (!member->meet(end)) return NCCL_EPX_TIMEOUT;
  }
  return 0;
}

}  // namespace

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::snprintf(id->internal, sizeof id->internal, "/ep_tests_%d_%u", getpid(), std::random_device{}());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  const int file = shm_open(id.internal, O_CREAT | O_RDWR, 0600);
  if (num_ranks > kMostRanks || file < 0 || ftruncate(file, sizeof(Meeting)) != 0) return ncclSystemError;
  void* memory = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  auto* member = new Member{static_cast<Meeting*>(memory), rank, num_ranks};  // lives as long as the process
  if (!member->meet(std::chrono::steady_clock::now() + std::chrono::seconds(60))) return ncclSystemError;
  shm_unlink(id.internal);
  return ncclEpxCommFromCallback(comm, rank, num_ranks, NCCL_EPX_DEVICE_CPU, &gather, member);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclEpxCommDestroy(comm); }
const char* ncclGetErrorString(ncclResult_t) { return ncclEpxGetLastError(); }

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
