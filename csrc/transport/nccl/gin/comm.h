// NCCL's device communicator with GIN, for kernels that cross NVLink domains.
#pragma once

#include <memory>

#include "transport/nccl/gin/library.h"
#include "transport/nccl/window.h"
#include "transport/transport.h"

namespace ep {

class GinComm {
 public:
  // Collective, after a window was registered on `comm`. Throws on all ranks: kTimeout if NCCL does not connect within
  // `seconds`, else kSystem with one sentence. After a timeout NCCL's threads are left alone, with all that they use.
  GinComm(Bootstrap& bootstrap, std::shared_ptr<NcclComm> comm, const GinRequest& request, double seconds);
  ~GinComm();
  GinComm(const GinComm&) = delete;
  GinComm& operator=(const GinComm&) = delete;

  const void* dev_comm() const { return dev_comm_; }
  const GinProperties& properties() const { return properties_; }
  GinBackend backend() const { return properties_.full; }

 private:
  void create(const GinRequest& request, int num_ranks, double seconds);

  std::shared_ptr<NcclComm> comm_;
  GinProperties properties_;
  void* dev_comm_ = nullptr;
};

// Refuses, with what to do, what the kernels cannot use. Pure but for the names.
void check_gin(const GinProperties& properties, uint32_t served_backends, int nccl_version);

}  // namespace ep
