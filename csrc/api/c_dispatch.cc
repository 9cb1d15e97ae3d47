// ncclEpDispatch and ncclEpxDispatchShapes; low latency's parameters.
#include "api/c_dispatch.h"

#include <utility>

#include "api/c_device.h"
#include "api/c_struct.h"
#include "runtime/policy.h"

namespace ep::c {
namespace {

// Descriptors that are given are filled; a caller's struct stays its own but for ndim, datatype and sizes.
void fill(const Output& output) {
  if (output.given == nullptr) return;
  auto* tensor = const_cast<ncclEpTensor_t*>(output.given);  // the caller's structs have pointers to what may change
  tensor->ndim = static_cast<unsigned>(output.sizes.ndim);
  if (output.sizes.ndim == 0) return;
  tensor->datatype = static_cast<ncclDataType_t>(output.dtype);
  std::copy_n(output.sizes.at.begin(), output.sizes.ndim, tensor->sizes);
}

LlDispatchParams ll_params(const ncclEpHandle& handle, const DispatchCall& call, const OutputPointers& out) {
  LlDispatchParams p;
  p.shape = handle.shape;
  p.output = handle.output;
  p.phase = call.is_split ? Phase::kSend : Phase::kFused;
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
  std::array<LlDispatchParams, NCCL_EPX_MAX_EXTRA> calls;
  int count = 0;

  // `p` gets what travels with it.
  static LlExtra of(const DispatchCall& call, const OutputPointers& out, const Group& group, LlDispatchParams& p) {
    LlExtra made;
    bool has_room = carries_extra(call.options.quant, static_cast<bool>(call.scales));
    for (int i = 0; i < NCCL_EPX_MAX_EXTRA; i++) {
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
  }
}

}  // namespace
}  // namespace ep::c

using namespace ep;
using namespace ep::c;

namespace {

struct DispatchArguments {
  ncclEpDispatchInputs_t inputs;
  ncclEpDispatchOutputs_t outputs;
  ncclEpDispatchConfig_t config;
  ncclEpxDispatchExtra_t extra;
};

DispatchArguments take_arguments(const ncclEpDispatchInputs_t* inputs, const ncclEpDispatchOutputs_t* outputs,
                                 const ncclEpDispatchConfig_t* config, const ncclEpxDispatchExtra_t* extra) {
  return {take(inputs, "inputs"), take(outputs, "outputs"), take_or_default(config, "config"),
          take_or_default(extra, "extra")};
}

void dispatch(ncclEpHandle_t given, const ncclEpDispatchInputs_t* inputs, const ncclEpDispatchOutputs_t* outputs,
              const ncclEpLayoutInfo_t* layout_info, const ncclEpDispatchConfig_t* config,
              const ncclEpxDispatchExtra_t* extra, void* stream) {
  ncclEpHandle& handle = object_of(given);
  handle.state->get();
  handle.require_nothing_pending();
  const WindowScope windows(handle.state->comm);
  const DispatchArguments all = take_arguments(inputs, outputs, config, extra);
  const auto info = take_or_default(layout_info, "layout_info");
  DispatchCall call = take_call(handle, all.inputs, all.config, all.extra);
  LayoutInfoParams to_write;
  if (handle.is_plain) {
    check_plain(call, handle, all.inputs, all.outputs);
    const Tensor rows = take_tensor(all.outputs.tokens, "output tokens");
    adopt_memory(handle, call.tokens.sizes.at[0], rows.sizes.at[0]);
    if (call.is_backward && handle.dispatched_tokens >= 0) call.is_cached = true;
    if (!handle.is_ht) to_write = take_counters(handle, info);
  } else {
    EP_CHECK(layout_info == nullptr, "layout_info is given, but the handle has options, and an info tensor");
  }
  handle.require_rows(call.is_cached);
  if (!call.is_cached) handle.require_given();
  check_inputs(call, handle, call.is_cached ? handle.dispatched_tokens : handle.given_tokens);
  Outputs made = outputs_of(call, handle, all.outputs, all.extra);
  if (handle.is_plain && made[kIdx].sizes.ndim > 0) take_ids(handle, info, made[kIdx], to_write);
  if (handle.is_ht) {
    dispatch_ht(handle, call, made, stream);
  } else {
    dispatch_ll(handle, call, made, stream);
  }
  if (handle.pending == Pending::kDispatch) {
    handle.layout_info = to_write;
  } else {
    write_info(handle, to_write, stream);
  }
  if (handle.device() < 0 && handle.pending != Pending::kDispatch) handle.state->check_overflow();
}

}  // namespace

extern "C" {

ncclResult_t ncclEpxDispatchShapes(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                   const ncclEpDispatchOutputs_t* outputs, const ncclEpDispatchConfig_t* config,
                                   const ncclEpxDispatchExtra_t* extra) {
  return guarded("ncclEpxDispatchShapes", [&] {
    const ncclEpHandle& object = object_of(handle);
    EP_CHECK_USAGE(!object.is_plain, "the handle has no options: nccl_ep.h says what its outputs are");
    const DispatchArguments all = take_arguments(inputs, outputs, config, extra);
    const DispatchCall call = take_call(object, all.inputs, all.config, all.extra);
    object.require_rows(call.is_cached);
    const Outputs made = outputs_of(call, object, all.outputs, all.extra);
    for (const Output& output : made) {  // refuse all or fill all
      if (output.given == nullptr) continue;
      EP_CHECK(take(output.given, output.name).sizes != nullptr, output.name, " has no room for sizes");
    }
    for (const Output& output : made) fill(output);
  });
}

ncclResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                            const ncclEpDispatchOutputs_t* outputs, const ncclEpLayoutInfo_t* layout_info,
                            const ncclEpDispatchConfig_t* config, cudaStream_t stream) {
  return guarded("ncclEpDispatch", [&] { dispatch(handle, inputs, outputs, layout_info, config, nullptr, stream); });
}

ncclResult_t ncclEpxDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                             const ncclEpDispatchOutputs_t* outputs, const ncclEpLayoutInfo_t* layout_info,
                             const ncclEpDispatchConfig_t* config, const ncclEpxDispatchExtra_t* extra,
                             cudaStream_t stream) {
  return guarded("ncclEpxDispatch", [&] { dispatch(handle, inputs, outputs, layout_info, config, extra, stream); });
}

}  // extern "C"
