#include "torch/ops/device.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "base/math.h"

#if defined(EP_WITH_CUDA)
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "transport/device/device_guard.h"
#endif

namespace ep {

at::Device device_of(const Group& group) {
  const GroupConfig& config = group.config();
  if (config.device_index < 0) return at::Device(at::kCPU);
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(config.device_index));
}

thread_local const c10::Stream *LaunchStreamScope::caller_ = nullptr, *LaunchStreamScope::stream_ = nullptr;

void* launch_stream([[maybe_unused]] const at::Device& device) {
#if defined(EP_WITH_CUDA)
  if (device.is_cuda()) {
    const c10::Stream* other = LaunchStreamScope::stream();
    return (other != nullptr ? c10::cuda::CUDAStream(*other) : c10::cuda::getCurrentCUDAStream(device.index()))
        .stream();
  }
#endif
  return nullptr;
}

bool is_capturing([[maybe_unused]] const at::Device& device) {
#if defined(EP_WITH_CUDA)
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EP_CUDA(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()).stream(), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

thread_local c10::DeviceIndex OnDevice::known_ = -1;

bool is_current([[maybe_unused]] const at::Device& device) {
#if defined(EP_WITH_CUDA)
  if (device.is_cuda()) {
    c10::cuda::SetTargetDevice();  // torch may have put that off
    return c10::cuda::current_device() == device.index();
  }
#endif
  return true;
}

namespace {

// Of the device, which is current where it is a GPU. Nobody asks whether torch has begun to use that: the buffer has.
c10::Allocator* allocator_of([[maybe_unused]] const at::Device& device) {
#if defined(EP_WITH_CUDA)
  if (device.is_cuda()) return c10::cuda::CUDACachingAllocator::get();
#endif
  return c10::GetCPUAllocator();
}
c10::DispatchKeySet key_of(const at::Device& device) {
  return c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
}

}  // namespace

at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType type, const at::Device& device) {
#if defined(EP_WITH_CUDA)
  if (device.is_cuda() && !OnDevice::is_known(device)) {
    return at::detail::empty_cuda(sizes, type, device, std::nullopt);
  }
#endif
  return at::detail::empty_generic(sizes, allocator_of(device), key_of(device), type, std::nullopt);
}

thread_local bool PackedResultsScope::is_on_ = false;

void new_tensors(std::span<const NewTensor> wanted, const at::Device& device) {
  if (!PackedResultsScope::is_on()) {
    for (const NewTensor& each : wanted) *each.tensor = new_tensor(each.sizes, each.type, device);
    return;
  }
  constexpr int64_t kLine = 128;  // where a tensor begins
  const auto bytes_of = [](const NewTensor& each) {
    return align_up(c10::multiply_integers(each.sizes) * static_cast<int64_t>(c10::elementSize(each.type)), kLine);
  };
  int64_t bytes = 0;
  for (const NewTensor& each : wanted) bytes += bytes_of(each);
  std::optional<OnDevice> on_device;
  if (!OnDevice::is_known(device)) on_device.emplace(device);
  const c10::Storage whole(c10::Storage::use_byte_size_t(), bytes, allocator_of(device), /*resizable=*/true);
  int64_t at = 0;
  for (const NewTensor& each : wanted) {
    *each.tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole), key_of(device),
                                                            c10::scalarTypeToTypeMeta(each.type));
    c10::TensorImpl* made = each.tensor->unsafeGetTensorImpl();
    made->set_storage_offset(at / static_cast<int64_t>(c10::elementSize(each.type)));
    made->set_sizes_contiguous(each.sizes);
    at += bytes_of(each);
  }
}

void clear_handle(at::Tensor& made) {
  if (made.is_cpu() && made.nbytes() > 0) std::memset(made.data_ptr(), 0, made.nbytes());
}

at::Tensor new_handle(at::IntArrayRef sizes, const at::Device& device) {
  at::Tensor handle = new_tensor(sizes, at::kInt, device);
  clear_handle(handle);
  return handle;
}

void* StreamOrder::next_stream(const at::Device& device) {
  if (LaunchStreamScope::stream() != nullptr) wait_for_caller(device);
  void* stream = launch_stream(device);
  const bool is_as_before = !captured_ && eager_ && *eager_ == stream;
  if (!is_as_before) switch_to(device, stream);
  noted_in_.reset();
  return stream;
}

#if defined(EP_WITH_CUDA)
namespace {

constexpr unsigned long long kNotCaptured = 0, kUnknown = ~0ull;

// Which capture a stream takes part in. Streams are waited for inside one capture, or outside of all.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = kNotCaptured;
  if (cudaStreamGetCaptureInfo(stream, &status, &id) != cudaSuccess) {  // of the default stream beside a capture
    cudaGetLastError();
    return kUnknown;
  }
  return status == cudaStreamCaptureStatusNone ? kNotCaptured : id;
}

// In an event that is made when first needed.
void record(void*& event, const at::Device& device, void* stream) {
  if (event == nullptr) {
    DeviceGuard guard(device.index());
    cudaEvent_t made = nullptr;
    EP_CUDA(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
    event = made;
  }
  EP_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}
void wait(void* stream, void* event) {
  EP_CUDA(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
}

}  // namespace

StreamOrder::~StreamOrder() {
  for (void* event : {event_, caller_event_}) {
    if (event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
}

void StreamOrder::wait_for_caller(const at::Device& device) {
  record(caller_event_, device, c10::cuda::CUDAStream(*LaunchStreamScope::caller()).stream());
  wait(launch_stream(device), caller_event_);
}

// What is captured is ordered inside its capture, by an event of that capture.
void StreamOrder::note_enqueued(const at::Device& device, void* stream) {
  if (!device.is_cuda() || !has_several_streams_) return;
  const unsigned long long capture = capture_of(static_cast<cudaStream_t>(stream));
  if (capture == kUnknown || (capture != kNotCaptured && !has_signals_)) return;
  record(event_, device, stream);
  noted_in_ = capture;
}

void StreamOrder::switch_to(const at::Device& device, void* stream) {
  if (!device.is_cuda()) {
    eager_ = stream;
    return;
  }
  const auto now = static_cast<cudaStream_t>(stream);
  const unsigned long long capture = capture_of(now);
  const std::optional<void*>& before = capture != kNotCaptured && captured_ ? captured_ : eager_;
  const auto last = static_cast<cudaStream_t>(before.value_or(stream));
  has_several_streams_ = has_several_streams_ || last != now;
  if (last != now && capture != kUnknown && capture_of(last) == capture) {
    if (noted_in_ != capture) record(event_, device, last);
    wait(now, event_);
  }
  if (capture == kNotCaptured) {
    eager_ = stream;
    captured_.reset();
  } else {
    captured_ = stream;
  }
}
#else
StreamOrder::~StreamOrder() = default;
void StreamOrder::switch_to(const at::Device&, void* stream) { eager_ = stream; }
void StreamOrder::wait_for_caller(const at::Device&) {}
void StreamOrder::note_enqueued(const at::Device&, void*) {}
#endif

}  // namespace ep
