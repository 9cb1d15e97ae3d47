// Marks functions that the host and CUDA kernels share.
#pragma once

#if defined(__CUDACC__)
#define EP_HD __host__ __device__ __forceinline__
#else
#define EP_HD inline
#endif
