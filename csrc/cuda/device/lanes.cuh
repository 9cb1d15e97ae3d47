// Where this thread is: lane, warp, and the block of its rank.
#pragma once

namespace ep {

// This block of this rank: in a world on one GPU, a launch holds the blocks of all ranks.
struct BlockPosition {
  int block;
  int num_blocks;

  __device__ static BlockPosition own() { return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}; }
  // `blocks`: of each rank.
  __device__ static BlockPosition in_world(int blocks) { return {static_cast<int>(blockIdx.x) % blocks, blocks}; }
};

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

}  // namespace ep
