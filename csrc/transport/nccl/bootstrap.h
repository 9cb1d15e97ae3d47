// The ranks of a caller's NCCL communicator, and how they find one another: by a collective of it.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/transport.h"

struct ncclComm;
struct ncclWindow_vidmem;

namespace ep {

// The communicator is used while ranks gather, and must be idle then; `device`, its GPU, must be the current one.
// Throws kSystem if it cannot be used. What is gathered must have come within `seconds`.
std::unique_ptr<Bootstrap> bootstrap_over(ncclComm* comm, int device, double seconds);

int device_of_comm(ncclComm* comm);
// Of this rank. Needs NCCL 2.29.2 or newer.
void* address_in_window(ncclComm* comm, ncclWindow_vidmem* window, uint64_t offset);

}  // namespace ep
