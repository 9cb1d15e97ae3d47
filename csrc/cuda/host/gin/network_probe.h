// A window over NCCL with GIN between its domains, and the probe's kernel on it (cuda/network/probe.h): for tests of
// the network, and for the time that bare puts take.
#pragma once

#include <memory>
#include <vector>

#include "cuda/network/probe.h"
#include "transport/nccl/gin/comm.h"
#include "transport/nccl/window.h"
#include "transport/transport.h"

namespace ep {

class NetworkProbe {
 public:
  // Collective, on the device.
  NetworkProbe(Bootstrap& bootstrap, int device, const Topology& topology, uint64_t window_bytes, int num_contexts,
               double seconds);
  ~NetworkProbe();
  NetworkProbe(const NetworkProbe&) = delete;
  NetworkProbe& operator=(const NetworkProbe&) = delete;

  // Into and from the own window.
  void write(Offset offset, const void* data, uint64_t bytes);
  void read(Offset offset, void* data, uint64_t bytes);

  struct Exchange {
    std::vector<int> peers;
    int messages = 1;
    uint64_t bytes = 16, first_bytes = 0;  // of each message; of the first one, if not 0
    Offset source = 0, target = 0;
    int rounds = 1, warm_up = 0;
    double seconds = 10;  // for each signal
  };
  // All ranks, each with the others that name it as peers, the same ones every time. Returns the time of a round after
  // the warm-up, in ns. Throws kTimeout that names rank and context; then the probe is used up.
  double exchange(const Exchange& exchange);
  // Enqueues one on a stream, also on one that captures a graph. No two at a time. Once it has run, check() throws what
  // exchange() would have thrown.
  void enqueue(const Exchange& exchange, cudaStream_t stream);
  void check();

  GinBackend backend() const { return backend_; }
  int nccl_version() const;         // of the NCCL loaded
  int kernel_nccl_version() const;  // that the kernels were compiled with

 private:
  const int device_, rank_;
  const Topology topology_;
  const uint64_t window_bytes_;
  const int num_contexts_;
  std::unique_ptr<NcclWindow> window_;
  std::unique_ptr<GinComm> gin_;
  GinBackend backend_ = GinBackend::kNone;
  cudaStream_t stream_ = nullptr;
  NetworkProbeState* state_ = nullptr;
  NetworkProbeResult* result_ = nullptr;  // pinned
  std::vector<int> peers_;                // of the first exchange
  double seconds_ = 0;                    // of the last one
};

}  // namespace ep
