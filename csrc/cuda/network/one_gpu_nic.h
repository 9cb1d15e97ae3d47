// A network for tests of several domains on one GPU: ranks fill queues of descriptors, and one block of their launch,
// the NIC of all ranks, moves the bytes. So tools that run one kernel at a time can look at kernels that cross domains.
#pragma once

#include <cstdint>

#include "cuda/network/simulated.h"
#include "cuda/protocol/device_state.h"

namespace ep {

// In device memory, one for all ranks.
struct OneGpuNic {
  static constexpr int kMaxItems = 64, kMaxNicRanks = 128;

  // A put that has not landed whole.
  struct Item {
    int rank;
    NicDescriptor what;
    uint64_t landed;  // bytes; from the end of the put
  };
  // Of a descriptor, which is dropped.
  enum Problem : uint32_t { kNone, kOverflow, kNoSuchPeer, kOffTheLinks, kNotAligned, kOutside, kNoSuchSignal };

  char* first_window;
  uint64_t window_stride, window_bytes;
  NicQueue* queues;   // [rank]
  uint64_t* signals;  // [rank][context][signal]
  int num_ranks, domain_size, link_size, num_contexts, num_signals;
  uint64_t random;   // state; 0: what is sent lands at once and in order
  uint32_t problem;  // the first one
  uint32_t ended;    // blocks of the launch under way
  uint64_t taken[kMaxNicRanks];
  uint64_t puts[kMaxNicRanks][kMaxNicRanks], bytes[kMaxNicRanks][kMaxNicRanks];  // [from][to]
};

struct OneGpuNetworkArgs : SimulatedNetworkArgs {
  OneGpuNic* nic = nullptr;
};

}  // namespace ep
