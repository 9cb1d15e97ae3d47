// ncclEpCombine, ncclEpCombineWeights, and ncclEpComplete for both operations.
#include "api/c_device.h"
#include "api/c_objects.h"
#include "api/c_struct.h"
#include "api/c_tensor.h"

namespace ep::c {
namespace {

Weighting to_weighting(ncclEpWeights_t weights, OutputLayout layout) {
  switch (weights) {
    case NCCL_EP_WEIGHTS_DISPATCH:
      return has_expert_rows(layout) ? Weighting::kDispatch : Weighting::kNone;
    case NCCL_EP_WEIGHTS_NONE:
      return Weighting::kNone;
    case NCCL_EP_WEIGHTS_HOME:
      return Weighting::kHome;
    default:
      raise(ErrorKind::kInvalidArgument, "weights ", weights, " is unknown");
  }
}

// Sizes of a tensor of the dispatch's rows.
Sizes rows_of(const OutputShape& output, int64_t last) {
  if (output.layout == OutputLayout::kExpertMajor) return {output.local_experts, output.capacity, last};
  if (output.layout == OutputLayout::kRankMajor) return {output.num_ranks, output.max_tokens, last};
  return {output.capacity, last};
}

void set_rows(LlCombineParams& p, const ncclEpCombineInputs_t& inputs) {
  const Tensor rows = take_tensor(inputs.tokens, "tokens");
  EP_CHECK(rows, "tokens are not given");
  const int64_t hidden = rows.sizes.last();
  EP_CHECK(hidden <= INT32_MAX, "rows of ", hidden, " elements");
  check_tensor(rows, "tokens", rows.dtype, rows_of(p.output, hidden));
  check_aligned(rows, "tokens");
  p.rows = rows.data;
  p.dtype = to_dtype(rows.dtype);
  p.hidden = static_cast<int>(hidden);
}

void set_weights(LlCombineParams& p, const ncclEpCombineInputs_t& inputs) {
  const Tensor weights = take_tensor(inputs.topk_weights, "topk_weights");
  const Tensor ids = take_tensor(inputs.topk_idx, "topk_idx");
  const bool is_home = p.weighting == Weighting::kHome;
  EP_CHECK(is_home || (!weights && !ids), "topk_weights and topk_idx of a combine go with NCCL_EP_WEIGHTS_HOME");
  if (!is_home) return;
  const Sizes choices{p.num_tokens, p.shape.topk};
  check_tensor(weights, "topk_weights", NCCL_EP_FLOAT32, choices);
  p.home_weights = static_cast<const float*>(weights.data);
  if (!ids) return;
  p.is_idx64 = ids.dtype == NCCL_EP_INT64;
  check_tensor(ids, "topk_idx", p.is_idx64 ? NCCL_EP_INT64 : NCCL_EP_INT32, choices);
  p.home_topk_idx = ids.data;
}

void set_out(LlCombineParams& p, const ncclEpCombineInputs_t& inputs, const ncclEpCombineOutputs_t& outputs,
             const ncclEpCombineConfig_t& config) {
  const Sizes sizes{p.num_tokens, p.hidden};
  const Tensor out = take_tensor(outputs.tokens, "output tokens");
  EP_CHECK(out, "output tokens are not given, must be of shape ", text_of(sizes));
  check_tensor(out, "output tokens", out.dtype, sizes);
  check_aligned(out, "output tokens");
  p.out = out.data;
  p.out_dtype = to_dtype(out.dtype);
  const ncclEpDataType_t wire = config.wire_dtype == NCCL_EP_DTYPE_AUTO ? out.dtype : config.wire_dtype;
  EP_CHECK(wire == out.dtype || wire == NCCL_EP_FLOAT32, "wire_dtype is ", wire, ", must be ", out.dtype,
           " as the output tokens, or ", NCCL_EP_FLOAT32, " (float32)");
  p.wire_dtype = to_dtype(wire);
  const ncclEpTensor_t* const biases[] = {inputs.bias0, inputs.bias1};
  for (int i = 0; i < 2; i++) {
    const char* name = i == 0 ? "bias0" : "bias1";
    const Tensor bias = take_tensor(biases[i], name);
    if (!bias) continue;
    check_tensor(bias, name, out.dtype, sizes);
    check_aligned(bias, name);
    p.bias[i] = bias.data;
  }
}

LlCombineParams make_params(const ncclEpHandle& handle, const ncclEpCombineInputs_t* given_inputs,
                            const ncclEpCombineOutputs_t* given_outputs, const ncclEpCombineConfig_t* given_config) {
  const auto inputs = take(given_inputs, "inputs");
  const auto outputs = take(given_outputs, "outputs");
  const auto config = take_or_default(given_config, "config");
  LlCombineParams p;
  p.shape = handle.shape;
  p.output = handle.output;
  p.half = config.send_only ? Half::kSend : Half::kBoth;
  p.weighting = to_weighting(config.weights, p.output.layout);
  p.num_tokens = handle.dispatched_tokens;
  p.num_sms = handle.num_sms(config.num_sms);
  p.handle = handle.pointers(p.num_tokens);
  set_rows(p, inputs);
  set_weights(p, inputs);
  set_out(p, inputs, outputs, config);
  return p;
}

void complete(ncclEpHandle& handle, void* stream) {
  Group& group = handle.state->get();
  EP_CHECK_USAGE(handle.pending != Pending::kNothing, "nothing was sent with this handle that could be received");
  const ScopedDevice device(handle.device());
  const Pending pending = handle.pending;
  if (pending == Pending::kDispatch) {
    handle.dispatch.half = Half::kReceive;
    group.dispatch(handle.dispatch, stream);
  } else {
    handle.combine.half = Half::kReceive;
    group.combine(handle.combine, stream);
  }
  handle.pending = Pending::kNothing;
  if (pending == Pending::kDispatch && handle.device() < 0) handle.state->check_overflow();
}

}  // namespace
}  // namespace ep::c

using namespace ep;
using namespace ep::c;

extern "C" {

ncclEpResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                             const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config, void* stream) {
  return guarded("ncclEpCombine", [&] {
    ncclEpHandle& object = object_of(handle);
    Group& group = object.state->get();
    object.require_dispatched();
    LlCombineParams p = make_params(object, inputs, outputs, config);
    const ScopedDevice device(object.device());
    group.combine(p, stream);
    if (p.half == Half::kSend) {
      object.combine = p;
      object.pending = Pending::kCombine;
    }
  });
}

ncclEpResult_t ncclEpCombineWeights(ncclEpHandle_t handle, const ncclEpTensor_t* values, const ncclEpTensor_t* out,
                                    void* stream) {
  return guarded("ncclEpCombineWeights", [&] {
    const ncclEpHandle& object = object_of(handle);
    Group& group = object.state->get();
    object.require_dispatched();
    Sizes sizes = rows_of(object.output, object.shape.topk);
    if (has_expert_rows(object.output.layout)) sizes.at[--sizes.ndim] = 0;
    const Tensor given = take_tensor(values, "values");
    check_tensor(given, "values", NCCL_EP_FLOAT32, sizes);
    LlCombineWeightsParams p;
    p.shape = object.shape;
    p.output = object.output;
    p.num_tokens = object.dispatched_tokens;
    p.handle = object.pointers(p.num_tokens);
    const Tensor result = take_tensor(out, "out");
    check_tensor(result, "out", NCCL_EP_FLOAT32, {p.num_tokens, p.shape.topk});
    p.values = static_cast<const float*>(given.data);
    p.out = static_cast<float*>(result.data);
    const ScopedDevice device(object.device());
    group.combine_weights(p, stream);
  });
}

ncclEpResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, void* stream) {
  return guarded("ncclEpComplete", [&] {
    take_or_default(config, "config");
    complete(object_of(handle), stream);
  });
}

}  // extern "C"
