// A low-latency dispatch, or its send or receive, for the ops of all conventions: they differ in what it writes.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/group.h"
#include "runtime/ll/params.h"
#include "torch/ops/arguments.h"

namespace ep {

struct DispatchInputs {
  const at::Tensor& x;
  const OptionalTensor& scales;
  const at::Tensor& topk_idx;
  const OptionalTensor& topk_weights;
};

// What the operation writes.
class DispatchOutputs {
 public:
  // Checks what was given, makes the rest, and lets `p` know where all of it is. `p` was found to fit.
  virtual void take(LlDispatchParams& p, const InputTypes& row, const Group& group, const at::Device& device) = 0;

 protected:
  ~DispatchOutputs() = default;
};

// All of it, or its send.
void run_dispatch(const at::Tensor& seq, const DispatchInputs& inputs, int64_t capacity, const DispatchConfig& config,
                  Phase phase, DispatchOutputs& outputs);
// The receive of what was sent with the same numbers.
void receive_dispatch(const at::Tensor& seq, const InputTypes& row, int64_t capacity, const DispatchConfig& config,
                      DispatchOutputs& outputs);

}  // namespace ep
