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
  GpuIdentity identity{};
  cudaDeviceProp properties;
  EP_CUDA(cudaGetDeviceProperties(&properties, device));
  EP_CUDA(cudaDeviceGetPCIBusId(identity.address, sizeof identity.address, device));
  std::memcpy(identity.gpu, properties.uuid.bytes, sizeof identity.gpu);
  identity.process = own_process();
  return identity;
}

bool is_world_on_one_gpu(Bootstrap& bootstrap, const GpuIdentity& mine) {
  const auto identities = gather(bootstrap, mine, "its GPU");
  const bool is_one = std::all_of(identities.begin(), identities.end(), [&](const GpuIdentity& identity) {
    return same_gpu(identity, identities[0]) && identity.process == identities[0].process;
  });
  if (is_one) return true;
  for (size_t r = 0; r < identities.size(); r++) {
    for (size_t s = 0; s < r; s++) {
      if (!same_gpu(identities[r], identities[s])) continue;
      if (identities[r].process == identities[s].process || !may_share_gpus()) {
        raise(ErrorKind::kInvalidUsage, "ranks ", bootstrap.rank_at(static_cast<int>(s)), " and ",
              bootstrap.rank_at(static_cast<int>(r)), " use the same GPU, ", identities[r].address,
              ": give every rank its own (in torch, torch.cuda.set_device(local_rank) before the buffer is made)");
      }
    }
  }
  return false;
}

}  // namespace ep
