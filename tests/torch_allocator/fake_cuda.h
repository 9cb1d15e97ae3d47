// A CUDA runtime of one device whose memory is the host's and on which nothing runs, in the place of the real one: so
// torch's own allocator, unchanged, can be asked for memory without a GPU. What CUDA forbids under capture ends the
// test.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

namespace fake_cuda {

struct Object {
  cudaHostFn_t destroy;
  void* data;
};

struct Graph {
  unsigned long long capture = 0;
  std::vector<Object> objects;
};

void begin_capture(cudaStream_t stream, Graph* graph);
void end_capture(cudaStream_t stream);
bool is_capturing(cudaStream_t stream, unsigned long long capture);
// Its objects are destroyed by another thread, as CUDA does it.
void destroy(Graph* graph);
int num_waits_for_events();

}  // namespace fake_cuda
