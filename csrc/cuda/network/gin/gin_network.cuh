// The network over NCCL's GPU-initiated networking. Weak signals alone, no flush, and no wait of NCCL's: those ask for
// what some networks do not have, or never end when a peer is gone.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

#include "cuda/network/network.h"

namespace ep {

// What sends is not inlined: NCCL's code for each kind of network would stand at every call, and take half of the time
// in which the kernels compile. What waits is, as a call in a loop keeps the loop's numbers in memory.
class GinNetwork {
 public:
  struct Args {
    ncclDevComm comm;
    ncclWindow_t window;
  };

  __device__ __forceinline__ explicit GinNetwork(const Args& args) : args_(&args) {}

  __device__ __noinline__ void put(int peer, int context, Offset target, Offset source, uint64_t bytes) const {
    gin(context).put(world(), peer, args_->window, target, args_->window, source, bytes, ncclGin_None{}, ncclGin_None{},
                     ncclCoopThread{}, ncclGin_None{}, kGiven);
  }
  __device__ __noinline__ void put_and_signal(int peer, int context, Offset target, Offset source, uint64_t bytes,
                                              int signal, uint64_t add) const {
    gin(context).put(world(), peer, args_->window, target, args_->window, source, bytes, action(signal, add),
                     ncclGin_None{}, ncclCoopThread{}, ncclGin_None{}, kGiven);
  }
  __device__ __noinline__ void signal(int peer, int context, int signal, uint64_t add) const {
    gin(context).signal(world(), peer, action(signal, add), ncclCoopThread{}, ncclGin_None{}, kGiven);
  }
  __device__ __forceinline__ uint64_t read_signal(int context, int signal) const {
    return gin(context).readSignal(static_cast<ncclGinSignal_t>(signal));
  }

 private:
  using Gin = ncclGin_BackendMask<NCCL_GIN_BACKEND_MASK_ALL>;  // all that this build has kernels for
  // The caller has made its data visible to the whole system (Network), so NCCL need not.
  static constexpr cuda::thread_scope kGiven = cuda::thread_scope_system;

  __device__ __forceinline__ Gin gin(int context) const { return Gin(args_->comm, context); }
  __device__ __forceinline__ ncclTeam world() const { return ncclTeamWorld(args_->comm); }
  __device__ __forceinline__ static ncclGin_WeakSignalAdd action(int signal, uint64_t add) {
    return {static_cast<ncclGinSignal_t>(signal), add};
  }

  const Args* args_;
};

static_assert(Network<GinNetwork>);

}  // namespace ep
