#include "transport/nccl/bootstrap.h"

#include <cuda_runtime.h>

#include <chrono>
#include <thread>

#include "transport/device/check_cuda.h"
#include "transport/nccl/api.h"
#include "transport/same_size_bootstrap.h"

namespace ep {
namespace {

using Clock = std::chrono::steady_clock;

// Memory and stream of one collective. A collective that has begun and that a missing rank has left unfinished is not
// waited for: it keeps both.
class Gathering {
 public:
  explicit Gathering(size_t bytes) {
    EP_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    const cudaError_t allocated = cudaMalloc(&memory_, bytes);
    if (allocated != cudaSuccess) cudaStreamDestroy(stream_);
    EP_CUDA(allocated);
  }
  ~Gathering() {
    if (is_pending_) return;
    cudaFree(memory_);
    cudaStreamDestroy(stream_);
  }
  Gathering(const Gathering&) = delete;
  Gathering& operator=(const Gathering&) = delete;

  char* memory() const { return static_cast<char*>(memory_); }
  cudaStream_t stream() const { return stream_; }

  void begin() { is_pending_ = true; }
  // False: it took longer.
  bool wait_until(Clock::time_point end) {
    cudaError_t state = cudaStreamQuery(stream_);
    while (state == cudaErrorNotReady && Clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      state = cudaStreamQuery(stream_);
    }
    is_pending_ = state != cudaSuccess;
    if (state != cudaErrorNotReady) EP_CUDA(state);
    return !is_pending_;
  }

 private:
  void* memory_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool is_pending_ = false;
};

class NcclBootstrap : public SameSizeBootstrap {
 public:
  NcclBootstrap(ncclComm_t comm, int rank, int num_ranks, double seconds)
      : SameSizeBootstrap(rank, num_ranks), comm_(comm), seconds_(seconds) {}

 private:
  void gather(const void* mine, void* all, size_t bytes) override {
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds_));
    Gathering gathering(bytes * (num_ranks() + 1));
    char* const sent = gathering.memory() + bytes * num_ranks();
    EP_CUDA(cudaMemcpyAsync(sent, mine, bytes, cudaMemcpyHostToDevice, gathering.stream()));
    gathering.begin();
    ncclResult_t result = nccl().all_gather(sent, gathering.memory(), bytes, ncclUint8, comm_, gathering.stream());
    while (result == ncclInProgress && Clock::now() < end) {  // of a communicator that does not block
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      check_nccl(nccl().comm_get_async_error(comm_, &result), "ncclCommGetAsyncError", comm_);
    }
    if (result != ncclInProgress) check_nccl(result, "ncclAllGather", comm_);
    if (result == ncclInProgress || !gathering.wait_until(end)) {
      raise(ErrorKind::kTimeout, "rank ", rank(), " waited ", seconds_, " s for all ", num_ranks(),
            " ranks of the communicator");
    }
    EP_CUDA(cudaMemcpyAsync(all, gathering.memory(), bytes * num_ranks(), cudaMemcpyDeviceToHost, gathering.stream()));
    EP_CUDA(cudaStreamSynchronize(gathering.stream()));
  }

  ncclComm_t comm_;
  double seconds_;
};

}  // namespace

std::unique_ptr<Bootstrap> bootstrap_over(ncclComm* comm, int device, double seconds) {
  int rank = -1, num_ranks = -1, comm_device = -1;
  check_nccl(nccl().comm_user_rank(comm, &rank), "ncclCommUserRank", comm);
  check_nccl(nccl().comm_count(comm, &num_ranks), "ncclCommCount", comm);
  check_nccl(nccl().comm_cu_device(comm, &comm_device), "ncclCommCuDevice", comm);
  EP_CHECK(comm_device == device, "device is ", device, ", but the communicator is of GPU ", comm_device);
  return std::make_unique<NcclBootstrap>(comm, rank, num_ranks, seconds);
}

int device_of_comm(ncclComm* comm) {
  int device = -1;
  check_nccl(nccl().comm_cu_device(comm, &device), "ncclCommCuDevice", comm);
  return device;
}

void* address_in_window(ncclComm* comm, ncclWindow_vidmem* window, uint64_t offset) {
  EP_CHECK(nccl().get_lsa_device_pointer != nullptr,
           "a tensor has a window and no data, which needs NCCL 2.29.2 or newer: give its data");
  void* address = nullptr;
  const NcclTeam team = nccl().team_lsa(comm);
  check_nccl(nccl().get_lsa_device_pointer(window, offset, team.rank, &address), "ncclGetLsaDevicePointer", comm);
  return address;
}

}  // namespace ep
