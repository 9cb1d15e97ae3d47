#include "torch_allocator/fake_cuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

namespace fake_cuda {
namespace {

constexpr size_t kPage = 2 << 20;

std::map<cudaStream_t, Graph*> captures;
int waits_for_events = 0;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

void require_no_capture(const char* call) {
  if (captures.empty() || mode == cudaStreamCaptureModeRelaxed) return;
  std::fprintf(stderr, "%s under capture\n", call);
  std::abort();
}

void destroy_object(const Object& object) { std::thread(object.destroy, object.data).join(); }

}  // namespace

void begin_capture(cudaStream_t stream, Graph* graph) { captures[stream] = graph; }
void end_capture(cudaStream_t stream) { captures.erase(stream); }

bool is_capturing(cudaStream_t stream, unsigned long long capture) {
  const auto found = captures.find(stream);
  return found != captures.end() && found->second->capture == capture;
}

void destroy(Graph* graph) {
  for (const Object& object : graph->objects) destroy_object(object);
  delete graph;
}

int num_waits_for_events() { return waits_for_events; }

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->totalGlobalMem = size_t{1} << 36;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{1} << 36;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "of the fake runtime"; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// ---- Memory

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  require_no_capture("cudaFree");
  std::free(memory);
  return cudaSuccess;
}

// ---- Streams and events

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -3;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static uintptr_t last = 0x1000;
  *stream = reinterpret_cast<cudaStream_t>(last += 16);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = static_cast<cudaEvent_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  require_no_capture("cudaEventQuery");
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  require_no_capture("cudaEventSynchronize");
  waits_for_events++;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

// ---- Capture

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* given) {
  std::swap(*given, mode);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = captures.contains(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, size_t*) {
#endif
  cudaStreamIsCapturing(stream, status);
  if (*status == cudaStreamCaptureStatusNone) return cudaSuccess;
  if (id != nullptr) *id = captures[stream]->capture;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(captures[stream]);
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* data, cudaHostFn_t destroy, unsigned, unsigned) {
  *object = reinterpret_cast<cudaUserObject_t>(new Object{destroy, data});
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t given, unsigned) {
  const auto* object = reinterpret_cast<Object*>(given);
  destroy_object(*object);
  delete object;
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t given, unsigned, unsigned) {
  const auto* object = reinterpret_cast<Object*>(given);
  reinterpret_cast<Graph*>(graph)->objects.push_back(*object);
  delete object;
  return cudaSuccess;
}

}  // extern "C"
