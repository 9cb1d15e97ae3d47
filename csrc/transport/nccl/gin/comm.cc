#include "transport/nccl/gin/comm.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/interruption.h"
#include "transport/collective_step.h"
#include "transport/device/check_cuda.h"
#include "transport/nccl/api.h"
#include "transport/nccl/version.h"

namespace ep {
namespace {

// A call of NCCL that may not return, in a thread of its own. What it uses belongs to it, and outlives a deadline.
class Attempt {
 public:
  Attempt(std::shared_ptr<NcclComm> comm, const GinRequest& request, double seconds)
      : comm(std::move(comm)), request(request), seconds(seconds), dev_comm(gin_library().new_dev_comm()) {
    EP_CUDA(cudaGetDevice(&device));
  }
  ~Attempt() { gin_library().free_dev_comm(dev_comm); }

  void run() {
    std::exception_ptr thrown;
    try {
      EP_CUDA(cudaSetDevice(device));
      const ncclResult_t result = gin_library().create(gin_nccl(), comm->get(), request, dev_comm);
      comm->finish(result, "ncclDevCommCreate", seconds);
    } catch (...) {
      thrown = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    is_done = true;
    error = thrown;
    changed.notify_all();
  }

  const std::shared_ptr<NcclComm> comm;
  const GinRequest request;
  const double seconds;
  int device = 0;
  void* dev_comm;

  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  std::exception_ptr error;
};

bool is_timeout(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& each) {
    return each.kind() == ErrorKind::kTimeout;
  } catch (...) {
    return false;
  }
}

}  // namespace

void check_gin(const GinProperties& properties, uint32_t served_backends, int nccl_version) {
  const std::string name = concat("NCCL ", nccl_version_name(nccl_version));
  if (properties.full == GinBackend::kNone) {
    const bool has_rail = properties.railed != GinBackend::kNone;
    raise(ErrorKind::kSystem, name, " offers no GPU-initiated networking (GIN) between all ranks",
          has_rail ? ", only along rails: unset NCCL_CROSS_NIC, which must not be 0"
                   : ": every GPU needs a NIC with GPUDirect RDMA (nvidia-peermem or DMA-BUF), NCCL_GIN_ENABLE must "
                     "not be 0; NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET says what NCCL looked for");
  }
  if (!properties.has_device_api) {
    raise(ErrorKind::kSystem, name,
          " offers no device API between these ranks: every GPU needs peer access to those of its domain, and neither "
          "NCCL_CUMEM_ENABLE nor NCCL_WIN_ENABLE may be 0");
  }
  if ((served_backends >> static_cast<int>(properties.full) & 1) == 0) {
    raise(ErrorKind::kSystem, name, " has chosen the GIN backend ", gin_backend_name(properties.full),
          ", for which this nccl_ep has no kernels: set NCCL_GIN_TYPE=2 (proxy), or build with "
          "NCCL_EP_GIN_BACKENDS=\"proxy;",
          gin_backend_name(properties.full), "\"");
  }
}

GinProperties require_gin(Bootstrap& bootstrap, NcclComm& comm, bool masks_ranks) {
  GinProperties properties;
  on_all_ranks(bootstrap, [&] {
    const GinTable& library = gin_library();
    check_nccl(library.query(gin_nccl(), comm.get(), &properties), "ncclCommQueryProperties", comm.get());
    check_gin(properties, library.backends, nccl().version);
    if (const char* problem = library.load_kernels(masks_ranks)) raise(ErrorKind::kSystem, problem);
  });
  return properties;
}

GinComm::GinComm(Bootstrap& bootstrap, std::shared_ptr<NcclComm> comm, const GinRequest& request, double seconds)
    : comm_(std::move(comm)) {
  on_all_ranks(bootstrap, [&] { create(request, bootstrap.num_ranks(), seconds); });
}

void GinComm::create(const GinRequest& request, int num_ranks, double seconds) {
  constexpr std::chrono::milliseconds kLookEvery{20};
  constexpr double kPatience = 2;  // beyond the deadline of NCCL's own call, of which its error tells more
  const auto attempt = std::make_shared<Attempt>(comm_, request, seconds);
  std::thread([attempt] { attempt->run(); }).detach();
  std::unique_lock lock(attempt->mutex);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds + kPatience);
  bool is_interrupted = false;
  while (!attempt->is_done && std::chrono::steady_clock::now() < end && !is_interrupted) {
    attempt->changed.wait_for(lock, kLookEvery);
    is_interrupted = !attempt->is_done && has_interruption();
  }
  if (!attempt->is_done || (attempt->error && is_timeout(attempt->error))) {
    comm_->abandon();
    if (is_interrupted) throw Interrupted("ncclDevCommCreate");
    raise(ErrorKind::kTimeout, "NCCL has not connected the network of ", num_ranks, " ranks within ", seconds,
          " s: a rank is missing, or a NIC cannot be reached (NCCL_DEBUG=INFO tells more)");
  }
  if (attempt->error) {
    comm_->fail();
    std::rethrow_exception(attempt->error);
  }
  const int contexts = gin_library().num_contexts(attempt->dev_comm);
  if (contexts < request.num_contexts) {
    gin_library().destroy(gin_nccl(), comm_->get(), attempt->dev_comm);
    raise(ErrorKind::kSystem, "NCCL has made ", contexts, " GIN contexts of the ", request.num_contexts,
          " that the kernels use: NCCL_GIN_NCONNECTIONS may not be set");
  }
  dev_comm_ = std::exchange(attempt->dev_comm, nullptr);
}

GinComm::~GinComm() {
  if (dev_comm_ == nullptr) return;
  if (!comm_->is_abandoned()) gin_library().destroy(gin_nccl(), comm_->get(), dev_comm_);
  gin_library().free_dev_comm(dev_comm_);
}

}  // namespace ep
