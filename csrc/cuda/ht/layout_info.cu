#include "cuda/ht/layout_info.h"
#include "cuda/launch/launch_util.h"

namespace ep {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 64;

// The counts are few, and one thread adds them up.
__global__ void __launch_bounds__(kThreads) layout_info(const __grid_constant__ LayoutInfoParams p) {
  if (blockIdx.x == 0 && threadIdx.x == 0) p.write_counts();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.num_ids; i += step) p.write_id(i);
}

}  // namespace

void load_layout_info_kernel() { load_kernel(&layout_info, 0); }

void launch_layout_info(const LayoutInfoParams& p, void* stream) {
  const int64_t blocks = std::clamp<int64_t>((p.num_ids + kThreads - 1) / kThreads, 1, kMaxBlocks);
  launch_kernel(&layout_info, static_cast<int>(blocks), kThreads, 0, false, stream, p);
}

}  // namespace ep
