// The simulated network (simulated.h) as a kernel sees it.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/network/network.h"
#include "cuda/network/simulated.h"

namespace ep {

class SimulatedNetwork {
 public:
  using Args = SimulatedNetworkArgs;

  __device__ explicit SimulatedNetwork(const Args& args) : args_(args) {}

  __device__ void put(int peer, int context, Offset target, Offset source, uint64_t bytes) const {
    post({0, peer, context, kNoSignal, 0, target, source, bytes, 0});
  }
  __device__ void put_and_signal(int peer, int context, Offset target, Offset source, uint64_t bytes, int signal,
                                 uint64_t add) const {
    post({0, peer, context, signal, 0, target, source, bytes, add});
  }
  __device__ void signal(int peer, int context, int signal, uint64_t add) const {
    post({0, peer, context, signal, 0, 0, 0, 0, add});
  }
  __device__ uint64_t read_signal(int context, int signal) const {
    return ptx::ld_acquire_sys(args_.signals + static_cast<int64_t>(context) * args_.num_signals + signal);
  }

 private:
  __device__ void post(const NicDescriptor& descriptor) const {
    NicQueue& queue = *args_.queue;
    const uint64_t number = atomicAdd(reinterpret_cast<unsigned long long*>(&queue.num_posted), 1ull);
    NicDescriptor& place = queue.descriptors[number % NicQueue::kDepth];
    // Pairs with the NIC, which has copied the descriptor that lay here.
    if (ptx::ld_acquire_sys(&place.is_posted) != 0) {
      queue.has_overflown = 1;
      return;
    }
    place = descriptor;
    __threadfence_system();
    ptx::st_relaxed_sys(&place.is_posted, number + 1);
    __threadfence_system();
  }

  const Args& args_;
};

}  // namespace ep
