// Communicators of a callback, which stand where NCCL's do.
#pragma once

#include <memory>
#include <optional>

#include "nccl_epx.h"
#include "transport/transport.h"

namespace ep::c {

struct CallbackComm {
  int rank, num_ranks, device;
  ncclEpxAllgather_t allgather;
  void* context;
};

std::optional<CallbackComm> callback_comm(ncclComm* comm);  // none: it is NCCL's
std::unique_ptr<Bootstrap> bootstrap_of(const CallbackComm& comm, double seconds);

}  // namespace ep::c
