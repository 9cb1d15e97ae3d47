// A consumer of a dispatch's arrivals in CUDA, which has nothing but the header that users are given.
#include <nccl_ep_signals.cuh>

// As arrivals_consumer.py: seen[row] = x[row] of int32 rows of `words`, block by block as they arrive; experts[row]:
// the block's. Then the signal of the block is counted up.
__global__ void copy_blocks(const int* x, int* seen, int* experts, int* signals, nccl_ep::Arrivals arrivals, int here,
                            int words, unsigned long long timeout_ns) {
  __shared__ int planned, came;
  if (threadIdx.x == 0) planned = nccl_ep::wait_plan(arrivals, timeout_ns);
  __syncthreads();
  int total = 0;  // of the plan's blocks
  for (int block = 0; block < here && planned >= 0; block++) total += arrivals.rows(block) > 0;
  if (planned >= 0 && total != planned) return;  // seen by the caller: rows are missing
  for (int place = blockIdx.x; place < planned; place += gridDim.x) {
    if (threadIdx.x == 0) came = nccl_ep::wait_rows(arrivals, place, timeout_ns);
    __syncthreads();
    const int block = came, rows = block < 0 ? 0 : arrivals.rows(block);
    if (rows == 0) return;  // given up
    const int first = arrivals.first(block), expert = arrivals.expert(block);
    for (int row = first; row < first + rows; row++) {
      const size_t at = static_cast<size_t>(row) * words;
      for (int word = threadIdx.x; word < words; word += blockDim.x) seen[at + word] = x[at + word];
      if (threadIdx.x == 0) experts[row] = expert;
    }
    __syncthreads();  // all have stored, and have read `came`
    if (threadIdx.x == 0) nccl_ep::signal_rows(signals + block);
  }
}

extern "C" int launch_copy_blocks(const int* x, int* seen, int* experts, int* signals, int* state, int blocks, int here,
                                  int words, unsigned long long timeout_ns, cudaStream_t stream) {
  copy_blocks<<<48, 256, 0, stream>>>(x, seen, experts, signals, nccl_ep::Arrivals{state, blocks}, here, words,
                                      timeout_ns);
  return static_cast<int>(cudaGetLastError());
}
