// What the launchers of all kernels share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/check_cuda.h"
#include "cuda/launch.h"

namespace ep {

constexpr int kMaxSharedBytes = 220 * 1024;

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

// Loads a kernel into the GPU and allows it `shared_bytes` of dynamic shared memory.
template <class Kernel>
void load_kernel(Kernel kernel, int shared_bytes) {
  cudaFuncAttributes attributes;
  EP_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  if (shared_bytes > 48 * 1024) {
    EP_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
}

void load_dispatch_kernels();
void load_combine_kernels();

}  // namespace ep
