// What high throughput's dispatches move: x and extra tensors [T, n], the first with scales or quantised. Outputs lie
// in the window's arena while there is room.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "runtime/ht/params.h"
#include "torch/ops/arguments.h"
#include "torch/ops/registry.h"

namespace ep {

// x and extra tensors. Each has a result of its own, empty where there is none: an op that changes an argument may
// not return a list (functionalization takes it for an alias).
constexpr int kMaxTensors = 4;

// A tensor that other ranks may write to or read; an ordinary one where there is no room for it.
at::Tensor arena_tensor(Registered& registered, at::IntArrayRef sizes, at::ScalarType type, const at::Device& device);

HtHandleShape ht_handle_shape(const OutputShape& output, const Group& group, int64_t num_tokens, int64_t num_slots);

struct HtPayload {
  at::TensorList xs;
  const OptionalTensor& scales;
};
void check_payload(const HtPayload& payload, int64_t num_tokens, const at::Device& device);
// Sizes and input pointers of all parts: x, its scales, the extra tensors. After `p.options.quant`.
void set_parts(HtDispatchParams& p, const HtPayload& payload);

// The outputs.
struct PayloadOutputs {
  std::vector<at::Tensor> xs;
  at::Tensor scales;
};
struct PayloadRefs {  // as DispatchRefs
  at::TensorList xs;
  const at::Tensor& scales;

  static PayloadRefs of(const PayloadOutputs& moved) { return {moved.xs, moved.scales}; }
};
PayloadOutputs allocate_payload(Registered& registered, const HtPayload& payload, const OutputShape& output,
                                const OutputTypes& types, const at::Device& device);
void check_payload_outputs(const PayloadRefs& moved, const HtPayload& payload, const OutputShape& output,
                           const OutputTypes& types, const at::Device& device, AliasCheck& aliases);
void set_payload_outputs(HtDispatchParams& p, const PayloadRefs& moved);
// What was dispatched along with x, and empty tensors; none to who takes results together.
std::array<at::Tensor, kMaxTensors - 1> extra(PayloadOutputs& moved, const at::Device& device);

}  // namespace ep
