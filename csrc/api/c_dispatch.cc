// ncclEpDispatch and ncclEpDispatchShapes; low latency's parameters.
#include "api/c_dispatch.h"

#include <utility>

#include "api/c_device.h"
#include "api/c_struct.h"
#include "runtime/policy.h"

namespace ep::c {
namespace {

// Descriptors that are given are filled; a caller's struct stays its own but for ndim, dtype and sizes.
void fill(const Output& output) {
  if (output.given == nullptr) return;
  ncclEpTensor_t full = take(output.given, output.name);
  full.ndim = output.sizes.ndim;
  full.dtype = output.sizes.ndim > 0 ? output.dtype : NCCL_EP_DTYPE_AUTO;
  std::copy(output.sizes.at.begin(), output.sizes.at.end(), full.sizes);
  std::fill(std::begin(full.strides), std::end(full.strides), 0);
  give(output.given, full);
}

LlDispatchParams ll_params(const ncclEpHandle& handle, const DispatchCall& call, const OutputPointers& out) {
  LlDispatchParams p;
  p.shape = handle.shape;
  p.output = handle.output;
  p.phase = call.config.send_only ? Phase::kSend : Phase::kFused;
  p.options = call.options;
  p.dtype = call.dtype;
  p.hidden = call.hidden;
  p.is_idx64 = handle.is_idx64;
  p.num_tokens = handle.given_tokens;
  p.handle = handle.pointers(p.num_tokens);
  p.x = call.tokens.data;
  p.topk_idx = handle.topk_idx;
  p.topk_weights = static_cast<const float*>(call.weights.data);
  if (call.scales) {
    p.scales = {call.scales.data, call.scales.strides[0], call.scales.strides[1], call.num_scales, call.scale_bytes};
  }
  p.out_x = out[kTokens];
  p.out_scales = {out[kScales], call.num_scales, 1, call.num_scales, call.scale_bytes};
  p.out_weights = static_cast<float*>(out[kWeights]);
  p.out_topk_idx = out[kIdx];
  p.row_expert = static_cast<int32_t*>(out[kRowExpert]);
  p.info = static_cast<int32_t*>(out[kInfo]);
  return p;
}

int row_bytes(const Tensor& tensor) { return static_cast<int>(tensor.sizes.at[1] * element_bytes(tensor.dtype)); }

// Extra tensors, as words of 32 bits: the first travels as scales do where tokens have none, each other one in an
// operation of its own. That has the same routing, and so writes what stands beside rows once more, the same bits.
struct LlExtra {
  std::array<LlDispatchParams, NCCL_EP_MAX_EXTRA> calls;
  int count = 0;

  // `p` gets what travels with it.
  static LlExtra of(const DispatchCall& call, const OutputPointers& out, const Group& group, LlDispatchParams& p) {
    LlExtra made;
    bool has_room = carries_extra(call.options.quant, static_cast<bool>(call.scales));
    for (int i = 0; i < NCCL_EP_MAX_EXTRA; i++) {
      const Tensor& tensor = call.extra[i];
      if (!tensor) continue;
      const int words = row_bytes(tensor) / 4;
      if (std::exchange(has_room, false)) {
        p.scales = {tensor.data, words, 1, words, 4};
        p.out_scales = {out[kExtra + i], words, 1, words, 4};
        continue;
      }
      group.check_opaque_rows(p.shape, row_bytes(tensor));
      LlDispatchParams& alone = made.calls[made.count++] = p;
      alone.scales = alone.out_scales = {};
      alone.options.quant = Quant::kNone;
      alone.options.reports_ids = false;
      alone.dtype = DType::kOpaque32;
      alone.hidden = words;
      alone.x = tensor.data;
      alone.out_x = out[kExtra + i];
    }
    return made;
  }
};

void dispatch_ll(ncclEpHandle& handle, const DispatchCall& call, const Outputs& outputs, void* stream) {
  const OutputPointers out = take_outputs(outputs);
  Group& group = handle.state->get();
  LlDispatchParams p = ll_params(handle, call, out);
  LlExtra extra = LlExtra::of(call, out, group, p);
  EP_CHECK(extra.count == 0 || p.phase == Phase::kFused, "send_only is set, and ", extra.count,
           " extra tensors need an operation of their own: a split call moves one in the rows of unquantised tokens");
  EP_CHECK(extra.count == 0 || !group.config().masks_late_ranks, extra.count,
           " extra tensors need an operation of their own, which may leave out other ranks: a group of enable_mask "
           "moves one in the rows of unquantised tokens");
  check_apart(call, handle, outputs, out);
  const ScopedDevice device(handle.device());
  group.dispatch(p, stream);
  for (int i = 0; i < extra.count; i++) group.dispatch(extra.calls[i], stream);
  handle.dispatched_tokens = p.num_tokens;
  if (p.phase == Phase::kSend) {
    handle.dispatch = p;
    handle.pending = Pending::kDispatch;
  } else if (handle.device() < 0) {
    handle.state->check_overflow();
  }
}

}  // namespace
}  // namespace ep::c

using namespace ep;
using namespace ep::c;

extern "C" {

ncclEpResult_t ncclEpDispatchShapes(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                    const ncclEpDispatchConfig_t* config, const ncclEpDispatchOutputs_t* outputs) {
  return guarded("ncclEpDispatchShapes", [&] {
    const ncclEpHandle& object = object_of(handle);
    const DispatchCall call = take_call(object, inputs, config);
    object.require_rows(call.config.cached != 0);
    const Outputs all = outputs_of(call, object, take(outputs, "outputs"));
    for (const Output& output : all) take_tensor(output.given, output.name);  // refuse all or fill all
    for (const Output& output : all) fill(output);
  });
}

ncclEpResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                              const ncclEpDispatchOutputs_t* outputs, const ncclEpDispatchConfig_t* config,
                              void* stream) {
  return guarded("ncclEpDispatch", [&] {
    ncclEpHandle& object = object_of(handle);
    object.state->get();
    object.require_nothing_pending();
    const DispatchCall call = take_call(object, inputs, config);
    object.require_rows(call.config.cached != 0);
    if (!call.config.cached) object.require_given();
    check_inputs(call, object, call.config.cached ? object.dispatched_tokens : object.given_tokens);
    const Outputs all = outputs_of(call, object, take(outputs, "outputs"));
    if (object.is_ht) {
      dispatch_ht(object, call, all, stream);
    } else {
      dispatch_ll(object, call, all, stream);
    }
  });
}

}  // extern "C"
