// What the launchers of all kernels share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/launch/launch.h"
#include "transport/device/check_cuda.h"

namespace ep {

constexpr int kMaxSharedBytes = Arch{}.dynamic_bytes();  // of a block, on any GPU

// Calls kernel(args) with `blocks` blocks; `args` is one kernel parameter.
template <class Kernel, class... Args>
void launch_kernel(Kernel kernel, int blocks, int threads, int shared_bytes, bool pdl, void* stream,
                   const Args&... args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  EP_CUDA(cudaLaunchKernelEx(&config, kernel, args...));
}

// Loads a kernel into the GPU and allows it `shared_bytes` of dynamic shared memory, or what the GPU has.
template <class Kernel>
void load_kernel(Kernel kernel, int shared_bytes) {
  cudaFuncAttributes attributes;
  EP_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  if (shared_bytes > 48 * 1024) {
    int device = 0, most = 0;
    EP_CUDA(cudaGetDevice(&device));
    EP_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    shared_bytes = std::min(shared_bytes, most - static_cast<int>(attributes.sharedSizeBytes));
    EP_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
}

// Builds with NCCL_EP_LAB: a plan from the environment, for measuring variants.
// Low latency: "blocks,warps,sender_blocks,sender_warps,receiver_block0,receiver_warp0,receiver_warps,steps,groups,
// streams". Of eight numbers the last is both steps, which combine has no use for, and groups.
inline LlPlan tuned([[maybe_unused]] const char* variable, LlPlan plan) {
#if defined(EP_LAB)
  if (const char* text = std::getenv(variable)) {
    int streams = 0;
    const int count = std::sscanf(text, "%d,%d,%d,%d,%d,%d,%d,%d,%d,%d", &plan.blocks, &plan.warps, &plan.sender_blocks,
                                  &plan.sender_warps, &plan.receiver_block0, &plan.receiver_warp0, &plan.receiver_warps,
                                  &plan.steps, &plan.groups, &streams);
    if (count == 8) plan.groups = plan.steps;
    plan.streams = streams != 0;
  }
#endif
  return plan;
}
// Its blocks of the rail: "slices,send_blocks,forward_blocks,sum_blocks", the last for operations that have any.
inline RailPlan tuned([[maybe_unused]] const char* variable, RailPlan plan) {
#if defined(EP_LAB)
  if (const char* text = std::getenv(variable)) {
    int sum_blocks = plan.sum_blocks;
    std::sscanf(text, "%d,%d,%d,%d", &plan.slices, &plan.send_blocks, &plan.forward_blocks, &sum_blocks);
    if (plan.sum_blocks > 0) plan.sum_blocks = sum_blocks;
  }
#endif
  return plan;
}
// High throughput: "blocks,warps,workers,chunks,senders,unit_pieces".
inline HtPlan tuned([[maybe_unused]] const char* variable, HtPlan plan) {
#if defined(EP_LAB)
  if (const char* text = std::getenv(variable)) {
    plan.senders = 0;
    std::sscanf(text, "%d,%d,%d,%d,%d,%d", &plan.blocks, &plan.warps, &plan.workers, &plan.chunks, &plan.senders,
                &plan.unit_pieces);
  }
#endif
  return plan;
}

void load_dispatch_kernels();
void load_combine_kernels();
void load_streamed_combine_kernels();
void load_announcing_dispatch_kernels();
void load_signalled_ht_combine_kernels();
void load_masking_dispatch_kernels();
void load_masking_combine_kernels();
void load_ht_route_kernels();
void load_ht_dispatch_kernels();
void load_ht_combine_kernels();

}  // namespace ep
