// Where a group's tensors live, and on which stream its operations run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <span>

#include "runtime/group.h"

namespace ep {

at::Device device_of(const Group& group);
inline c10::Stream current_stream_of(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
bool is_capturing(const at::Device& device);    // the current stream, whose allocations these are
void* launch_stream(const at::Device& device);  // the current one, or LaunchStreamScope's; null on the CPU

// The operation that this thread runs is launched on `stream`. That waits for `caller`, the current stream, once
// results are allocated: what was before on `caller` may have used their memory. Both null: as without.
class LaunchStreamScope {
 public:
  LaunchStreamScope(const c10::Stream* caller, const c10::Stream* stream) {
    caller_ = caller;
    stream_ = stream;
  }
  ~LaunchStreamScope() { caller_ = stream_ = nullptr; }
  LaunchStreamScope(const LaunchStreamScope&) = delete;
  LaunchStreamScope& operator=(const LaunchStreamScope&) = delete;
  static const c10::Stream* caller() { return caller_; }
  static const c10::Stream* stream() { return stream_; }

 private:
  static thread_local const c10::Stream *caller_, *stream_;
};

bool is_current(const at::Device& device);  // true of the CPU

// The device is the current one while it lives: asked for once, and set where it was not. torch's guard always sets it
// in the end.
class OnDevice {
 public:
  explicit OnDevice(const at::Device& device)
      : guard_(is_current(device) ? std::nullopt : std::optional(device)), before_(known_) {
    known_ = device.index();
  }
  ~OnDevice() { known_ = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  // Whether it is the one that the innermost of these in this thread has.
  static bool is_known(const at::Device& device) { return device.index() == known_; }

 private:
  const c10::OptionalDeviceGuard guard_;
  const c10::DeviceIndex before_;
  static thread_local c10::DeviceIndex known_;  // -1: none
};

// As at::empty, without its way through the dispatcher: an op's kernel is below all that would want to know.
at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType type, const at::Device& device);
// Of a tensor that is to be made.
struct NewTensor {
  at::Tensor* tensor;
  at::IntArrayRef sizes;
  at::ScalarType type;
};
// What is small beside rows. Where PackedResultsScope says so they share one allocation, for each takes the host as
// long as checking the call. They are no views of one another; record_stream of any is that of all.
void new_tensors(std::span<const NewTensor> wanted, const at::Device& device);
// Of the op that runs in this thread, called by C++ and not by torch: by its schema results do not alias and are there,
// and opcheck looks.
class PackedResultsScope {
 public:
  explicit PackedResultsScope(bool is_on) { is_on_ = is_on; }
  ~PackedResultsScope() { is_on_ = false; }
  PackedResultsScope(const PackedResultsScope&) = delete;
  PackedResultsScope& operator=(const PackedResultsScope&) = delete;
  static bool is_on() { return is_on_; }

 private:
  static thread_local bool is_on_;
};
// An int32 tensor of a handle. Entries that no operation reads are 0 on the CPU, so that opcheck finds equal handles;
// a GPU's kernels leave them.
at::Tensor new_handle(at::IntArrayRef sizes, const at::Device& device);
void clear_handle(at::Tensor& made);  // of any tensor, what new_handle() does to its own

// A buffer's operations run in the order of their calls, whatever the streams.
class StreamOrder {
 public:
  StreamOrder() = default;
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  // launch_stream(), which waits from now on for the operations before, should they run on another. What a graph is
  // captured for comes after what was captured before: where it is replayed is the caller's to order.
  void* next_stream(const at::Device& device);
  // The operation is enqueued on that stream. Where several streams are expected, an operation that tells so delays a
  // later one on another stream by itself alone, not by what the caller has put on its stream meanwhile.
  void note_enqueued(const at::Device& device, void* stream);
  // The first operation on another stream has the same effect, but for itself: an event costs as much as a launch, and
  // most buffers live on one stream.
  void expect_several_streams() { has_several_streams_ = true; }
  // From now on combines on another stream wait for rows that the caller's kernels still write, on the stream of the
  // operations before. They must not come after those kernels: note_before_signals() is note_enqueued() then, in
  // captures too.
  void expect_signals() { has_signals_ = has_several_streams_ = true; }
  void note_before_signals(const at::Device& device, void* stream) {
    if (has_signals_) note_enqueued(device, stream);
  }

 private:
  void switch_to(const at::Device& device, void* stream);
  void wait_for_caller(const at::Device& device);

  std::optional<void*> eager_;     // stream of the last operation that was not captured
  std::optional<void*> captured_;  // of the last operation, if that one was captured
  void *event_ = nullptr, *caller_event_ = nullptr;
  std::optional<unsigned long long> noted_in_;  // the capture in which event_ stands behind the last operation
  bool has_several_streams_ = false, has_signals_ = false;
};

}  // namespace ep
