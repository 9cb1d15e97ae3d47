// What the files of ops have in common.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <memory>

#include "base/check.h"
#include "torch/common/errors.h"
#include "torch/common/interruption.h"
#include "torch/ops/arguments.h"
#include "torch/ops/device.h"
#include "torch/ops/registry.h"

namespace ep {

// Errors of the library as Python's.
template <class Body>
auto guarded(Body body) {
  try {
    return body();
  } catch (const Error& error) {
    rethrow_interruption();
    throw_in_python(error);
  }
}

// What an op begins with: the buffer's group, and its device as the current one for as long as the op runs.
struct OnGroup {
  explicit OnGroup(const at::Tensor& seq)
      : registered(find_group(seq)), group(*registered->group), device(device_of(group)), on_device(device) {}

  const std::shared_ptr<Registered> registered;
  Group& group;
  const at::Device device;
  const OnDevice on_device;
};

// What the handle's tensor cannot tell by itself.
struct HandleInfo {
  int64_t num_tokens, topk, num_experts;
  OutputShape output;

  static HandleInfo of(int num_ranks, int64_t num_tokens, int64_t capacity, const RoutingNumbers& routing) {
    return {num_tokens, routing.topk, routing.num_experts, output_shape(num_ranks, routing, capacity)};
  }
  Shape shape() const { return {output.num_ranks, static_cast<int>(num_experts), output.topk, output.max_tokens}; }
};

// The tensors of a combine. Null: not given. No copies: DispatchRefs says why.
struct CombineArgs {
  const at::Tensor *rows = nullptr, *weights = nullptr, *topk_idx = nullptr;
  at::TensorList biases;
  int64_t hidden = 0;
  at::ScalarType rows_dtype = at::kFloat;
  int64_t* wait_cost = nullptr;             // [R]
  const at::Tensor* row_signals = nullptr;  // RowSignals::counters, of a send or in high throughput
};

inline const at::Tensor* pointer_to(const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; }

// `given`: where the result goes; null: into a new tensor, which is returned where the call receives.
at::Tensor run_combine(const OnGroup& on, const at::Tensor& handle, int64_t num_tokens, int64_t capacity,
                       const CombineConfig& config, const CombineArgs& args, Phase phase, const at::Tensor* given);

}  // namespace ep
