// Where a group's tensors live, and on which stream its operations run.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <optional>

#include "runtime/group.h"

namespace ep {

at::Device device_of(const Group& group);
bool is_capturing(const at::Device& device);     // the current stream
void* current_stream(const at::Device& device);  // a cudaStream_t; null on the CPU

// As at::empty, without its way through the dispatcher: an op's kernel is below all that would want to know.
at::Tensor new_tensor(at::IntArrayRef sizes, at::ScalarType type, const at::Device& device);
// An int32 tensor of a handle. Entries that no operation reads are 0 on the CPU, so that opcheck finds equal handles;
// a GPU's kernels leave them.
at::Tensor new_handle(at::IntArrayRef sizes, const at::Device& device);

// A buffer's operations run in the order of their calls, whatever the streams.
class CallOrder {
 public:
  CallOrder() = default;
  ~CallOrder();
  CallOrder(const CallOrder&) = delete;
  CallOrder& operator=(const CallOrder&) = delete;

  // The current stream, which waits from now on for the operations before, should they run on another. What a graph is
  // captured for comes after what was captured before: where it is replayed is the caller's to order.
  void* next_stream(const at::Device& device);
  // The operation is enqueued on that stream. An operation that tells so delays a later one on another stream by itself
  // alone, not by what the caller has put on its stream meanwhile.
  void note_enqueued(const at::Device& device, void* stream);

 private:
  void switch_to(const at::Device& device, void* stream);
  void record(const at::Device& device, void* stream);

  std::optional<void*> eager_;     // stream of the last operation that was not captured
  std::optional<void*> captured_;  // of the last operation, if that one was captured
  void* event_ = nullptr;
  bool is_noted_ = false;  // event_ stands behind the last operation
};

}  // namespace ep
