// Errors of the CUDA runtime become ep::Error, with the call in the text.
#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"

namespace ep {

inline void check_cuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // a refused call must not be found again as the error of the next launch
  raise(ErrorKind::kSystem, call, ": ", cudaGetErrorName(code), ": ", cudaGetErrorString(code));
}

}  // namespace ep

#define EP_CUDA(call) ::ep::check_cuda((call), #call)
