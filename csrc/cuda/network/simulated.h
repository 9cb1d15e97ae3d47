// A network for tests: a queue of descriptors that kernels fill, and a thread of the host that takes them and moves the
// bytes, as a NIC would (tests/gpu_emulator/network/nic.h). The windows of all ranks are addresses of this process.
#pragma once

#include <cstdint>

#include "layout/common/region.h"

namespace ep {

constexpr int kNoSignal = -1;

struct NicDescriptor {
  uint64_t is_posted;  // 0: free; else its number, from 1 on. Comes last
  int32_t peer, context, signal;
  int32_t unused;
  Offset target, source;
  uint64_t bytes, add;
};

// Of a rank.
struct NicQueue {
  static constexpr int kDepth = 4096;
  uint64_t num_posted;
  uint32_t has_overflown;
  NicDescriptor descriptors[kDepth];
};

struct SimulatedNetworkArgs {
  NicQueue* queue = nullptr;
  const uint64_t* signals = nullptr;  // [context][signal], of this rank
  int num_signals = 0;                // of a context
};

}  // namespace ep
