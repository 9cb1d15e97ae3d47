// The ranks of a caller's NCCL communicator, and how they find one another: by a collective of it.
#pragma once

#include <memory>

#include "transport/transport.h"

struct ncclComm;

namespace ep {

// The communicator is used while ranks gather, and must be idle then; `device`, its GPU, must be the current one.
// Throws kSystem if it cannot be used. What is gathered must have come within `seconds`.
std::unique_ptr<Bootstrap> bootstrap_over(ncclComm* comm, int device, double seconds);

}  // namespace ep
