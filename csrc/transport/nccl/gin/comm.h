// NCCL's device communicator with GIN, for kernels that cross NVLink domains.
#pragma once

#include <memory>

#include "transport/nccl/gin/library.h"
#include "transport/nccl/window.h"
#include "transport/transport.h"

namespace ep {

// Collective, before anything that takes time: whether NCCL has a network for the kernels of this build between the
// communicator's ranks, and loads these kernels. Throws kSystem on all ranks, with one sentence.
GinProperties require_gin(Bootstrap& bootstrap, NcclComm& comm, bool masks_ranks);

class GinComm {
 public:
  // Collective, after require_gin() and after a window was registered on `comm`. Throws on all ranks: kTimeout if NCCL
  // does not connect within `seconds`, else kSystem with one sentence. After a timeout NCCL's threads are left alone,
  // with all that they use.
  GinComm(Bootstrap& bootstrap, std::shared_ptr<NcclComm> comm, const GinRequest& request, double seconds);
  ~GinComm();
  GinComm(const GinComm&) = delete;
  GinComm& operator=(const GinComm&) = delete;

  const void* dev_comm() const { return dev_comm_; }

 private:
  void create(const GinRequest& request, int num_ranks, double seconds);

  std::shared_ptr<NcclComm> comm_;
  void* dev_comm_ = nullptr;
};

// Refuses, with what to do, what the kernels cannot use. Pure but for the names.
void check_gin(const GinProperties& properties, uint32_t served_backends, int nccl_version);

}  // namespace ep
