#include "base/check.h"
#include "cuda/device/ptx.cuh"
#include "cuda/ht/token_layout.h"
#include "cuda/launch/launch_util.h"
#include "cuda/protocol/ids.cuh"

namespace ep {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 64;
constexpr int kMaxCounts = (48 << 10) / sizeof(int32_t);  // in shared memory that need not be asked for

// A thread for each token: no other thread writes its flags. `bins`: this block's share of the counts.
__device__ __forceinline__ void count_token(const TokenLayoutParams& p, int token, int32_t* bins) {
  const int ranks = p.shape.num_ranks, topk = p.shape.topk, domain_size = p.topology.domain_size;
  bool* is_in_rank = p.is_in_rank + static_cast<int64_t>(token) * ranks;
  for (int r = 0; r < ranks; r++) is_in_rank[r] = false;
#pragma unroll 1
  for (int k = 0; k < topk; k++) {
    const int64_t id = load_id(p.topk_idx, p.is_idx64, static_cast<int64_t>(token) * topk + k);
    if (!p.shape.valid(id)) continue;
    atomicAdd(bins + p.expert_bin(static_cast<int>(id)), 1);
    const int rank = p.shape.owner(static_cast<int>(id)), domain = p.topology.domain_of(rank);
    if (is_in_rank[rank]) continue;
    bool is_in_domain = false;
    for (int r = domain * domain_size; r < (domain + 1) * domain_size; r++)
      is_in_domain = is_in_domain || is_in_rank[r];
    is_in_rank[rank] = true;
    atomicAdd(bins + rank, 1);
    if (p.has_domains() && !is_in_domain) atomicAdd(bins + p.domain_bin(domain), 1);
  }
}

// Counts begin as zeros.
__global__ void __launch_bounds__(kThreads) token_layout(const __grid_constant__ TokenLayoutParams p) {
  EP_DYNAMIC_SHARED(int32_t, bins);
  for (int i = threadIdx.x; i < p.num_counts(); i += kThreads) bins[i] = 0;
  __syncthreads();
  for (int token = blockIdx.x * kThreads + threadIdx.x; token < p.num_tokens; token += gridDim.x * kThreads) {
    count_token(p, token, bins);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_counts(); i += kThreads) {
    if (bins[i] != 0) atomicAdd(p.counts + i, bins[i]);
  }
}

}  // namespace

void load_token_layout_kernel() { load_kernel(&token_layout, 0); }

void launch_token_layout(const TokenLayoutParams& p, void* stream) {
  EP_CHECK(p.num_counts() <= kMaxCounts, p.shape.num_experts, " experts of ", p.shape.num_ranks,
           " ranks, the layout of tokens on CUDA serves ", kMaxCounts, " of both together");
  const int bytes = p.num_counts() * static_cast<int>(sizeof(int32_t));
  EP_CUDA(cudaMemsetAsync(p.counts, 0, bytes, static_cast<cudaStream_t>(stream)));
  const int blocks = std::clamp((p.num_tokens + kThreads - 1) / kThreads, 1, kMaxBlocks);
  launch_kernel(&token_layout, blocks, kThreads, bytes, false, stream, p);
}

}  // namespace ep
