// What the unit tests of nccl-extensions ask of the inside of their library: how many rows come, which an update tells.
// tests/c/test_nvidia_tests.py and test_nvidia_programs.py link it into each test.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl_epx.h>

#include <algorithm>
#include <cstring>
#include <map>

namespace {

template <class Function>
Function next_of(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

int64_t* device_word() {
  void* memory = nullptr;
  cudaMalloc(&memory, sizeof(int64_t));
  return static_cast<int64_t*>(memory);
}

std::map<ncclEpHandle_t, int64_t> received;

ncclEpxHandleInfo_t info_of(ncclEpHandle_t handle) {
  ncclEpxHandleInfo_t info = NCCL_EPX_HANDLE_INFO_INIT;
  ncclEpxHandleGetInfo(handle, &info);
  return info;
}

}  // namespace

// Calls with a counter of the rows, where the caller has given none, and notes what it says.
template <class Call>
ncclResult_t with_total(const ncclEpLayoutInfo_t* given, ncclEpHandle_t* handle, cudaStream_t stream, Call call) {
  const bool is_whole = given == nullptr || given->size >= NCCL_EP_LAYOUT_INFO_V1_SIZE;
  if (!is_whole) return call(given);
  static int64_t* const own_total = device_word();
  size_t one = 1;
  ncclEpTensor_t total = NCCL_EP_TENSOR_INIT;
  total.ndim = 1;
  total.datatype = ncclInt64;
  total.data = own_total;
  total.sizes = &one;
  ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
  if (given != nullptr) std::memcpy(&info, given, given->size < sizeof info ? given->size : sizeof info);
  info.size = sizeof info;
  if (info.recv_total_counter == nullptr) info.recv_total_counter = &total;
  const ncclEpTensor_t* counter = info.recv_total_counter;
  const ncclResult_t result = call(&info);
  if (result != ncclSuccess) return result;
  int64_t count = 0;  // of 32 bits, or of 64: little endian
  cudaMemcpyAsync(&count, counter->data, counter->datatype == ncclInt64 ? 8 : 4, cudaMemcpyDefault, stream);
  cudaStreamSynchronize(stream);
  received[*handle] = std::min(count, info_of(*handle).capacity);
  return result;
}

extern "C" {

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* ids, const ncclEpLayoutInfo_t* given,
                                cudaStream_t stream) {
  static const auto next = next_of(&ncclEpUpdateHandle, "ncclEpUpdateHandle");
  const auto call = [&](const ncclEpLayoutInfo_t* info) { return next(handle, ids, info, stream); };
  const bool is_ht = info_of(handle).algorithm == NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT;
  return is_ht ? with_total(given, &handle, stream, call) : call(given);
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                                const ncclEpTensor_t* ids, const ncclEpLayoutInfo_t* given,
                                const ncclEpHandleConfig_t* config, cudaStream_t stream) {
  static const auto next = next_of(&ncclEpCreateHandle, "ncclEpCreateHandle");
  const auto call = [&](const ncclEpLayoutInfo_t* info) {
    return next(handle, group, layout, ids, info, config, stream);
  };
  ncclEpxGroupInfo_t told = NCCL_EPX_GROUP_INFO_INIT;
  ncclEpxGroupGetInfo(group, &told);
  return told.algorithm == NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT ? with_total(given, handle, stream, call) : call(given);
}

}  // extern "C"

ncclResult_t ncclEpHandle_test_getNumRecvTokens(ncclEpHandle_t handle, unsigned int* count) {
  *count = static_cast<unsigned>(received[handle]);
  return ncclSuccess;
}
int ncclEpHandle_test_getNumTopk(ncclEpHandle_t handle) { return info_of(handle).topk; }
int ncclEpHandle_test_getMaxTokensPerRank(ncclEpHandle_t handle) { return info_of(handle).max_tokens; }
ncclResult_t ncclEpGroup_test_setMaxDynamicSmem(ncclEpGroup_t, int) { return ncclSuccess; }
int ncclEpGroup_test_getLastLlCombineWarpsPerGroup(ncclEpGroup_t) { return 0; }  // there are no such groups of warps
