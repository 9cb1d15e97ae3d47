#include "cuda/host/gin/network_probe.h"

#include <algorithm>

#include "transport/collective_step.h"
#include "transport/device/device_guard.h"
#include "transport/nccl/api.h"

namespace ep {

NetworkProbe::NetworkProbe(Bootstrap& bootstrap, int device, const Topology& topology, uint64_t window_bytes,
                           int num_contexts, double seconds)
    : device_(device),
      rank_(bootstrap.rank()),
      topology_(topology),
      window_bytes_(window_bytes),
      num_contexts_(num_contexts) {
  EP_CHECK(num_contexts >= 1 && num_contexts <= kMaxProbeContexts, "num_contexts is ", num_contexts, ", must be 1 to ",
           kMaxProbeContexts);
  const DeviceGuard guard(device_);
  on_all_ranks(bootstrap, [&] {
    gin_library();  // before anything that takes time
    EP_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    EP_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&result_), sizeof *result_, cudaHostAllocMapped));
    *result_ = {};
    EP_CUDA(cudaMalloc(reinterpret_cast<void**>(&state_), sizeof *state_));
    EP_CUDA(cudaMemsetAsync(state_, 0, sizeof *state_, stream_));
    EP_CUDA(cudaStreamSynchronize(stream_));
  });
  auto comm = NcclComm::agree(bootstrap, device, seconds);
  backend_ = require_gin(bootstrap, *comm, false).full;
  window_ = std::make_unique<NcclWindow>(bootstrap, comm, topology, window_bytes, seconds);
  const GinRequest request{num_contexts, NetworkProbeParams::num_signals(topology.num_ranks), 0};
  gin_ = std::make_unique<GinComm>(bootstrap, comm, request, seconds);
}

NetworkProbe::~NetworkProbe() {
  try {
    const DeviceGuard guard(device_);
    cudaDeviceSynchronize();
    gin_.reset();
    window_.reset();
    cudaFree(state_);
    cudaFreeHost(result_);
    cudaStreamDestroy(stream_);
  } catch (const Error&) {  // a device that is broken frees nothing
  }
}

void NetworkProbe::write(Offset offset, const void* data, uint64_t bytes) {
  EP_CHECK(bytes <= window_bytes_ && offset <= window_bytes_ - bytes, "bytes ", offset, " to ", offset + bytes,
           " of a window of ", window_bytes_);
  const DeviceGuard guard(device_);
  EP_CUDA(cudaMemcpyAsync(window_->peers().local<char>(offset), data, bytes, cudaMemcpyHostToDevice, stream_));
  EP_CUDA(cudaStreamSynchronize(stream_));
}

void NetworkProbe::read(Offset offset, void* data, uint64_t bytes) {
  EP_CHECK(bytes <= window_bytes_ && offset <= window_bytes_ - bytes, "bytes ", offset, " to ", offset + bytes,
           " of a window of ", window_bytes_);
  const DeviceGuard guard(device_);
  EP_CUDA(cudaMemcpyAsync(data, window_->peers().local<char>(offset), bytes, cudaMemcpyDeviceToHost, stream_));
  EP_CUDA(cudaStreamSynchronize(stream_));
}

void NetworkProbe::enqueue(const Exchange& given, cudaStream_t stream) {
  const uint64_t block = given.bytes * static_cast<uint64_t>(given.messages) * topology_.num_ranks;
  EP_CHECK(given.messages >= 1 && given.bytes >= 16 && given.bytes % 16 == 0, given.messages, " messages of ",
           given.bytes, " bytes: must be at least one, of a positive multiple of 16 bytes");
  EP_CHECK(given.first_bytes <= given.bytes && given.first_bytes % 16 == 0, "a first message of ", given.first_bytes,
           " bytes: must be a multiple of 16, at most ", given.bytes);
  EP_CHECK(given.source % 16 == 0 && given.target % 16 == 0 && given.source + block <= window_bytes_ &&
               given.target + block <= window_bytes_,
           "messages from ", given.source, " and to ", given.target, " take ", block, " bytes each of a window of ",
           window_bytes_);
  EP_CHECK(given.rounds > given.warm_up && given.warm_up >= 0, given.rounds, " rounds with a warm-up of ",
           given.warm_up);
  EP_CHECK_USAGE(result_->has_failed == 0, "this probe has failed: late signals would be counted");
  NetworkProbeParams params;
  params.rank = rank_;
  params.num_ranks = topology_.num_ranks;
  params.num_contexts = num_contexts_;
  EP_CHECK(given.peers.size() <= NetworkProbeParams::kMaxPeers, given.peers.size(), " peers of the probe, at most ",
           NetworkProbeParams::kMaxPeers);
  for (int peer : given.peers) {
    EP_CHECK(peer >= 0 && peer < topology_.num_ranks && !topology_.is_lsa(peer, rank_), "rank ", peer,
             " is no rank of another domain");
    params.peers[params.num_peers++] = peer;
  }
  EP_CHECK(peers_.empty() || peers_ == given.peers, "a probe has the same peers in all its rounds");
  params.messages = given.messages;
  params.bytes = given.bytes;
  params.first_bytes = given.first_bytes != 0 ? given.first_bytes : given.bytes;
  params.source = given.source;
  params.target = given.target;
  params.rounds = given.rounds;
  params.warm_up = given.warm_up;
  params.timeout_ns = static_cast<uint64_t>(given.seconds * 1e9);
  params.state = state_;
  const DeviceGuard guard(device_);
  EP_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&params.result), result_, 0));
  if (const char* problem = gin_library().launch_probe(gin_->dev_comm(), window_->get(), params, stream)) {
    raise(ErrorKind::kSystem, problem);
  }
  peers_ = given.peers;
  seconds_ = given.seconds;
}

void NetworkProbe::check() {
  if (result_->has_failed == 0) return;
  raise(ErrorKind::kTimeout, "rank ", rank_, " waited ", seconds_, " s for rank ", result_->peer, " on context ",
        result_->context, ": expected ", result_->expected, ", seen ", result_->seen);
}

double NetworkProbe::exchange(const Exchange& given) {
  enqueue(given, stream_);
  const DeviceGuard guard(device_);
  EP_CUDA(cudaStreamSynchronize(stream_));
  check();
  return static_cast<double>(result_->timed_ns) / (given.rounds - given.warm_up);
}

int NetworkProbe::nccl_version() const { return nccl().version; }
int NetworkProbe::kernel_nccl_version() const { return gin_library().nccl_version; }

}  // namespace ep
