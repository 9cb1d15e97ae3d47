// As much of NCCL as the unit tests and programs of nccl-extensions use, without NCCL: a communicator is
// ncclEpxCommFromCallback's over memory that the processes share, a window is the memory itself. With ON_CPU the ranks
// are the CPU's. Else each is of the process's GPU, which several may share (NCCL_MULTI_RANK_GPU_ENABLE=1), and the
// library's windows are of cuMem: rank r of a program with MPI sees its own as the first (CUDA_VISIBLE_DEVICES).
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>
#include <nccl_device.h>
#include <nccl_epx.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>

#include "meeting.h"

namespace {

template <class Function>
Function next_of(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

int world_size = 0;

int32_t gather(void* context, const void* mine, void* all, size_t bytes, uint64_t timeout_ns) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  return static_cast<Member*>(context)->gather(mine, all, bytes, end) ? 0 : NCCL_EPX_TIMEOUT;
}

int current_device() {
#ifdef ON_CPU
  return NCCL_EPX_DEVICE_CPU;
#else
  int found = -1;
  cudaGetDevice(&found);
  return found;
#endif
}

}  // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::snprintf(id->internal, sizeof id->internal, "/ep_tests_%d_%u", getpid(), std::random_device{}());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  Member* member = Member::join(id.internal, rank, num_ranks);
  if (member == nullptr) return ncclSystemError;
  world_size = num_ranks;
  return ncclEpxCommFromCallback(comm, rank, num_ranks, current_device(), &gather, member);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclEpxCommDestroy(comm); }
const char* ncclGetErrorString(ncclResult_t) { return ncclEpxGetLastError(); }

ncclTeam_t ncclTeamLsa(ncclComm_t) { return {world_size, 0, 1}; }

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  return cudaMalloc(memory, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclMemFree(void* memory) { return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void* memory, size_t, ncclWindow_t* window, int) {
  *window = static_cast<ncclWindow_t>(memory);
  return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* group, ncclComm_t comm, const ncclEpGroupConfig_t* config) {
  ncclEpxGroupOptions_t options = NCCL_EPX_GROUP_OPTIONS_INIT;
  options.window = NCCL_EPX_WINDOW_CUMEM;
  return ncclEpxCreateGroup(group, comm, config, &options);
}

#ifndef ON_CPU
// Programs take the GPU that has the number of the rank among those of its host.
int gethostname(char* name, size_t size) {
  const char* rank = std::getenv("MPI_RANK");
  return std::snprintf(name, size, "host%s", rank == nullptr ? "" : rank), 0;
}
#endif

}  // extern "C"

// ---- Windows, whose address NCCL finds

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

extern "C" {

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
