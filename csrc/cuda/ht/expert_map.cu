#include "base/check.h"
#include "cuda/device/ptx.cuh"
#include "cuda/ht/expert_map.h"
#include "cuda/launch/launch_util.h"
#include "cuda/protocol/ids.cuh"

namespace ep {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 64;
constexpr int kMaxCounts = (48 << 10) / sizeof(int32_t);  // in shared memory that need not be asked for

__global__ void __launch_bounds__(kThreads) map_experts(const __grid_constant__ ExpertMapParams p) {
  EP_DYNAMIC_SHARED(int32_t, counts);  // this block's share of the load
  const bool counts_load = p.load != nullptr;
  if (counts_load) {
    for (int i = threadIdx.x; i < p.num_logical; i += kThreads) counts[i] = 0;
    __syncthreads();
  }
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < p.num_choices(); i += gridDim.x * kThreads) {
    const int64_t id = load_id(p.topk_idx, p.is_idx64, i);
    store_id(p.out, p.is_idx64, i, static_cast<int>(p.physical(id, i)));
    if (counts_load && p.is_logical(id)) atomicAdd(counts + id, 1);
  }
  if (!counts_load) return;
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_logical; i += kThreads) {
    if (counts[i] != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(p.load + i), static_cast<unsigned long long>(counts[i]));
    }
  }
}

}  // namespace

void load_expert_map_kernel() { load_kernel(&map_experts, 0); }

void launch_expert_map(const ExpertMapParams& p, void* stream) {
  if (p.num_choices() == 0) return;
  EP_CHECK(p.load == nullptr || p.num_logical <= kMaxCounts, "load counts ", p.num_logical,
           " experts, on CUDA at most ", kMaxCounts);
  const int bytes = p.load == nullptr ? 0 : p.num_logical * static_cast<int>(sizeof(int32_t));
  const int blocks = std::clamp((p.num_choices() + kThreads - 1) / kThreads, 1, kMaxBlocks);
  launch_kernel(&map_experts, blocks, kThreads, bytes, false, stream, p);
}

}  // namespace ep
