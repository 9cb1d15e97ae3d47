#include "api/c_comm.h"

#include "api/c_error.h"
#include "api/c_live.h"
#include "api/factory.h"
#include "transport/same_size_bootstrap.h"

namespace ep::c {
namespace {

class CallbackBootstrap : public SameSizeBootstrap {
 public:
  CallbackBootstrap(const CallbackComm& comm, double seconds)
      : SameSizeBootstrap(comm.rank, comm.num_ranks), comm_(comm), timeout_ns_(static_cast<uint64_t>(seconds * 1e9)) {}

 private:
  void gather(const void* mine, void* all, size_t bytes) override {
    const int32_t result = comm_.allgather(comm_.context, mine, all, bytes, timeout_ns_);
    if (result == 0) return;
    raise(result == NCCL_EPX_TIMEOUT ? ErrorKind::kTimeout : ErrorKind::kSystem, "rank ", rank(), " could not gather ",
          bytes, " bytes from ", num_ranks(), " ranks: the callback returned ", result, ", ",
          ncclEpxGetErrorString(result));
  }

  CallbackComm comm_;
  uint64_t timeout_ns_;
};

CallbackComm* object_of(ncclComm* comm) { return reinterpret_cast<CallbackComm*>(comm); }

}  // namespace

std::optional<CallbackComm> callback_comm(ncclComm* comm) {
  if (!is_live(comm, ObjectKind::kComm)) return {};
  std::optional<CallbackComm> found;
  with_live(comm, ObjectKind::kComm, [&] { found = *object_of(comm); });
  return found;
}

std::unique_ptr<Bootstrap> bootstrap_of(const CallbackComm& comm, double seconds) {
  return std::make_unique<CallbackBootstrap>(comm, seconds);
}

}  // namespace ep::c

using namespace ep;
using namespace ep::c;

extern "C" {

ncclResult_t ncclEpxCommFromCallback(ncclComm_t* comm, int rank, int num_ranks, int device,
                                     ncclEpxAllgather_t allgather, void* context) {
  return guarded("ncclEpxCommFromCallback", [&] {
    EP_CHECK(comm != nullptr, "comm is null");
    EP_CHECK(num_ranks >= 1 && rank >= 0 && rank < num_ranks, "rank ", rank, " of ", num_ranks, " ranks");
    EP_CHECK(allgather != nullptr || num_ranks == 1, "allgather is null in a world of ", num_ranks, " ranks");
    EP_CHECK(device >= NCCL_EPX_DEVICE_CPU, "device is ", device, ", must be NCCL_EPX_DEVICE_CPU (",
             NCCL_EPX_DEVICE_CPU, ") or the ordinal of a CUDA device");
    if (device >= 0 && !has_cuda_backend()) {
      throw ApiError(NCCL_EPX_NOT_SUPPORTED, concat("device is ", device, ", but this library was built without CUDA"));
    }
    auto made = std::make_unique<CallbackComm>(CallbackComm{rank, num_ranks, device, allgather, context});
    add_live(made.get(), ObjectKind::kComm);
    *comm = reinterpret_cast<ncclComm_t>(made.release());
  });
}

ncclResult_t ncclEpxCommDestroy(ncclComm_t comm) {
  return guarded("ncclEpxCommDestroy", [&] {
    if (comm == nullptr) return;
    remove_live(comm, ObjectKind::kComm);
    delete object_of(comm);
  });
}

}  // extern "C"
