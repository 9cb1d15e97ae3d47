// The only device code that includes NCCL's headers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // theirs
#include <nccl_device.h>
#pragma GCC diagnostic pop

#include <cstddef>

#include "transport/device/check_cuda.h"
#include "transport/nccl/api.h"
#include "transport/nccl/window.h"

namespace ep {
namespace {

// The words of ncclWindow_vidmem that NCCL 2.28.9 fills, as this build's headers place them.
constexpr bool kReadsOldWindows =
    offsetof(ncclWindow_vidmem, lsaFlatBase) == 8 && offsetof(ncclWindow_vidmem, lsaRank) == 16 &&
    offsetof(ncclWindow_vidmem, worldRank) == 20 && offsetof(ncclWindow_vidmem, stride4G) == 24;
static_assert(sizeof(NcclTeam) == sizeof(ncclTeam) && offsetof(NcclTeam, stride) == offsetof(ncclTeam, stride));

__global__ void nccl_ep_query_window(ncclWindow_t window, LsaPeers* peers) {
  char* first = static_cast<char*>(ncclGetLsaPointer(window, 0, 0));
  char* second = static_cast<char*>(ncclGetLsaPointer(window, 0, 1));
  char* local = static_cast<char*>(ncclGetLocalPointer(window, 0));
  peers->base = first;
  peers->stride = second - first;
  peers->rank = static_cast<int>((local - first) / (second - first));
}

}  // namespace

LsaPeers query_lsa_peers(ncclWindow_t window) {
  if (!kReadsOldWindows) {
    raise(ErrorKind::kSystem, "nccl_ep was compiled with headers of NCCL ", NCCL_VERSION_CODE,
          ", whose windows differ from those of the NCCL loaded: install NCCL 2.29.2 or newer");
  }
  LsaPeers* answer = nullptr;
  cudaStream_t stream = nullptr;
  EP_CUDA(cudaHostAlloc(&answer, sizeof(LsaPeers), cudaHostAllocMapped));
  LsaPeers peers;
  try {
    EP_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    nccl_ep_query_window<<<1, 1, 0, stream>>>(window, answer);
    EP_CUDA(cudaGetLastError());
    EP_CUDA(cudaStreamSynchronize(stream));
    peers = *answer;
  } catch (const Error&) {
    if (stream != nullptr) cudaStreamDestroy(stream);
    cudaFreeHost(answer);
    throw;
  }
  cudaStreamDestroy(stream);
  cudaFreeHost(answer);
  return peers;
}

}  // namespace ep
