// A dispatch of exact sizes on the host: the routing kernel writes the sizes into pinned memory, the host waits for
// them.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "cuda/host/memory.h"
#include "runtime/backend.h"

namespace ep {

class ExactSizes {
 public:
  // `backend` has the memory.
  ExactSizes(Memory& memory, Backend& backend) : memory_(memory), backend_(backend) {}

  // Where the kernel puts them. Refuses a stream that is being captured.
  void prepare(HtRouteParams& routing, cudaStream_t stream);
  // Of the launch that followed. Throws, and the buffer has failed, if they do not come.
  void await(const HtDispatchParams& params, cudaStream_t stream);
  // Another thread destroys the buffer.
  void end_waits() { is_destroyed_ = true; }

 private:
  bool have_come() const;
  void check_waiting(cudaStream_t stream, bool looks);
  [[noreturn]] void interrupt();

  Memory& memory_;
  Backend& backend_;
  uint64_t epoch_before_ = 0;
  std::atomic<bool> is_destroyed_{false};
};

}  // namespace ep
