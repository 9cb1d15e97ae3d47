#include "cuda/device/ptx.cuh"
#include "cuda/ht/observed_counts.h"
#include "cuda/launch/launch_util.h"
#include "cuda/protocol/ids.cuh"

namespace ep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kLoads = 4;          // of a lane at a time
constexpr int kRanksInLanes = 16;  // up to which a lane counts the rows of its rank, without atomics

// The blocks are one cluster, whose blocks read one another's shared memory: nothing is left for the next operation.
#if defined(EP_EMULATED_GPU)
#define __cluster_dims__(...)
constexpr int kBlocks = 1;
__device__ __forceinline__ void cluster_barrier() { __syncthreads(); }
__device__ __forceinline__ const int32_t* of_block(const int32_t* shared, int) { return shared; }
#else
constexpr int kBlocks = 8;
__device__ __forceinline__ void cluster_barrier() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
__device__ __forceinline__ const int32_t* of_block(const int32_t* shared, int block) {
  return static_cast<const int32_t*>(__cluster_map_shared_rank(shared, block));
}
#endif

// The kernel begins: what was before it on the stream is over.
__device__ __forceinline__ void begin_with_time(uint64_t* time_ns) {
  ptx::wait_for_prerequisites();
  ptx::launch_dependents();
  if (time_ns != nullptr && blockIdx.x == 0 && threadIdx.x == 0) ptx::st_relaxed_sys(time_ns, ptx::global_timer_ns());
}
__device__ __forceinline__ uint64_t* end_of(const ObservedCounts& p) {
  return p.has_time ? p.recorded.words + RecordedWords::kEnds : nullptr;
}

__device__ __forceinline__ void put(const ObservedCounts& p, int i, int32_t count) {
  ptx::st_relaxed_sys(p.recorded.words + RecordedWords::kCounts + i, p.recorded.count(count));
}

// A choice of the lane, k of its token, or expert -1. The choices of a token are in neighbouring lanes of a warp.
// `rows`: the count of this lane's rank. A whole warp calls.
__device__ __forceinline__ void count_choice(const ObservedCounts& p, int lane, int k, int expert, int32_t* bins,
                                             int& rows) {
  const int ranks = p.shape.num_ranks;
  const int owner = expert >= 0 ? p.by_local_experts.divide(expert) : -1;
  if (p.has_choices && expert >= 0) atomicAdd(bins + ranks + expert, 1);
  bool is_row = expert >= 0;
  if (!p.has_row_per_choice) {
    for (int back = 1; back < p.shape.topk; back++) {
      const int before = __shfl_up_sync(~0u, owner, back);
      is_row = is_row && (back > k || before != owner);
    }
  }
  if (ranks > kRanksInLanes) {
    if (is_row) atomicAdd(bins + owner, 1);
    return;
  }
  for (int r = 0; r < ranks; r++) {
    const int count = __popc(__ballot_sync(~0u, is_row && owner == r));
    if (lane == r) rows += count;
  }
}

// A warp takes as many whole tokens at a time as it has lanes for.
__device__ __forceinline__ void count_ids(const ObservedCounts& p, int32_t* bins) {
  const int lane = threadIdx.x % 32, warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const int topk = p.shape.topk, tokens = 32 / topk, stride = kBlocks * kWarps * tokens;
  const int token_of_lane = lane / topk, k = lane - token_of_lane * topk;
  int rows = 0;
  for (int first = warp * tokens; first < p.num_tokens; first += kLoads * stride) {
    RawId ids[kLoads];
    bool are_there[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int token = first + i * stride + token_of_lane;
      are_there[i] = token_of_lane < tokens && token < p.num_tokens;
      ids[i] = RawId{};
      if (are_there[i]) ids[i] = RawId::load(p.ids, p.is_idx64, static_cast<int64_t>(token) * topk + k);
    }
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int expert = are_there[i] ? static_cast<int>(ids[i].below(p.shape.num_experts, p.is_idx64)) : -1;
      count_choice(p, lane, k, expert, bins, rows);
    }
  }
  if (lane < p.shape.num_ranks && rows > 0) atomicAdd(bins + lane, rows);
}

__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kThreads)
    observed_ids(const __grid_constant__ ObservedCounts p) {
  EP_DYNAMIC_SHARED(int32_t, bins);
  const int words = p.num_words();
  for (int i = threadIdx.x; i < words; i += kThreads) bins[i] = 0;
  __syncthreads();
  begin_with_time(end_of(p));
  count_ids(p, bins);
  cluster_barrier();
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < words; i += kBlocks * kThreads) {
    int32_t sum = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; block++) sum += *of_block(bins + i, block);
    put(p, i, sum);
  }
  cluster_barrier();  // a block that has gone can no longer be read
}

__global__ void __launch_bounds__(32) observed_rows(const __grid_constant__ ObservedCounts p) {
  begin_with_time(end_of(p));
  for (int r = threadIdx.x; r < p.num_words(); r += 32) put(p, r, p.rows[r]);
}

__global__ void __launch_bounds__(32) observed_time(uint64_t* time_ns) { begin_with_time(time_ns); }

}  // namespace

void load_observed_counts_kernels() {
  load_kernel(&observed_ids, 0);
  load_kernel(&observed_rows, 0);
  load_kernel(&observed_time, 0);
}

void launch_observed_time(uint64_t* time_ns, void* stream) {
  launch_kernel(&observed_time, 1, 32, 0, true, stream, time_ns);
}

void launch_observed_counts(ObservedCounts p, void* stream) {
  if (p.rows != nullptr || !p.has_rows) return launch_kernel(&observed_rows, 1, 32, 0, true, stream, p);
  p.by_local_experts = Divisor::of(p.shape.local_experts());
  const int bytes = p.num_words() * static_cast<int>(sizeof(int32_t));
  launch_kernel(&observed_ids, kBlocks, kThreads, bytes, true, stream, p);
}

}  // namespace ep
