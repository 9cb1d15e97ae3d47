#include "cuda/host/gpu_identity.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "transport/collective_step.h"
#include "transport/device/check_cuda.h"

namespace ep {
namespace {

bool same_gpu(const GpuIdentity& a, const GpuIdentity& b) { return std::memcmp(a.gpu, b.gpu, sizeof a.gpu) == 0; }

// NCCL's own switch for ranks of several processes on one GPU, which take turns there: for tests, too slow for work.
bool may_share_gpus() {
  const char* text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

}  // namespace

GpuIdentity own_gpu_identity(int device) {
  GpuIdentity seat{};
  cudaDeviceProp properties;
  EP_CUDA(cudaGetDeviceProperties(&properties, device));
  EP_CUDA(cudaDeviceGetPCIBusId(seat.address, sizeof seat.address, device));
  std::memcpy(seat.gpu, properties.uuid.bytes, sizeof seat.gpu);
  seat.process = own_process();
  return seat;
}

bool is_world_on_one_gpu(Bootstrap& bootstrap, const GpuIdentity& mine) {
  const auto seats = gather(bootstrap, mine, "its GPU");
  const bool is_one = std::all_of(seats.begin(), seats.end(), [&](const GpuIdentity& seat) {
    return same_gpu(seat, seats[0]) && seat.process == seats[0].process;
  });
  if (is_one) return true;
  for (size_t r = 0; r < seats.size(); r++) {
    for (size_t s = 0; s < r; s++) {
      if (!same_gpu(seats[r], seats[s])) continue;
      if (seats[r].process == seats[s].process || !may_share_gpus()) {
        raise(ErrorKind::kInvalidUsage, "ranks ", s, " and ", r, " use the same GPU, ", seats[r].address,
              ": give every rank its own (in torch, torch.cuda.set_device(local_rank) before the buffer is made)");
      }
    }
  }
  return false;
}

}  // namespace ep
