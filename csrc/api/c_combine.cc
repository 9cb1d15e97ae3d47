// ncclEpCombine, ncclEpCombineWeights, and ncclEpComplete for both operations.
#include "api/c_device.h"
#include "api/c_dispatch.h"
#include "api/c_struct.h"
#include "runtime/call.h"
#include "runtime/policy.h"

namespace ep::c {
namespace {

Weighting to_weighting(ncclEpWeights_t weights, OutputLayout layout) {
  switch (weights) {
    case NCCL_EP_WEIGHTS_DISPATCH:
      return weighting_by_dispatch(layout);
    case NCCL_EP_WEIGHTS_NONE:
      return Weighting::kNone;
    case NCCL_EP_WEIGHTS_HOME:
      return Weighting::kHome;
    default:
      raise(ErrorKind::kInvalidArgument, "weights ", weights, " is unknown");
  }
}

// Sizes of scalars for each row, or for each choice of it.
Sizes values_of(const OutputShape& output) {
  const Sizes rows = row_sizes(output);
  return has_expert_rows(output.layout) ? rows : rows.with(output.topk);
}

void check_values(const ncclEpHandle& handle, const Tensor& values, const Tensor& out, const char* out_name) {
  check_tensor(values, "values", NCCL_EP_FLOAT32, values_of(handle.output));
  check_tensor(out, out_name, NCCL_EP_FLOAT32, {handle.dispatched_tokens, handle.shape.topk});
}

// ---- What the parameters of both algorithms have in common.

template <class Params>
void set_rows(Params& p, const ncclEpCombineInputs_t& inputs) {
  const Tensor rows = take_tensor(inputs.tokens, "tokens");
  EP_CHECK(rows, "tokens are not given");
  const int64_t hidden = rows.sizes.last();
  EP_CHECK(hidden <= INT32_MAX, "rows of ", hidden, " elements");
  check_tensor(rows, "tokens", rows.dtype, row_sizes(p.output).with(hidden));
  check_aligned(rows, "tokens");
  p.rows = rows.data;
  p.dtype = to_dtype(rows.dtype);
  p.hidden = static_cast<int>(hidden);
}

template <class Params>
void set_weights(Params& p, const ncclEpCombineInputs_t& inputs) {
  const Tensor weights = take_tensor(inputs.topk_weights, "topk_weights");
  const Tensor ids = take_tensor(inputs.topk_idx, "topk_idx");
  const bool is_home = p.options.weighting == Weighting::kHome;
  EP_CHECK(is_home || (!weights && !ids), "topk_weights and topk_idx of a combine go with NCCL_EP_WEIGHTS_HOME");
  if (!is_home) return;
  const Sizes choices{p.num_tokens, p.shape.topk};
  check_tensor(weights, "topk_weights", NCCL_EP_FLOAT32, choices);
  p.home_weights = static_cast<const float*>(weights.data);
  if (!ids) return;
  check_id_type(ids);
  check_tensor(ids, "topk_idx", ids.dtype, choices);
  p.is_idx64 = ids.dtype == NCCL_EP_INT64;
  p.home_topk_idx = ids.data;
}

DType wire_type(ncclEpDataType_t asked, ncclEpDataType_t out) {
  if (asked == NCCL_EP_DTYPE_AUTO || asked == out) return to_dtype(out);
  const bool is_wide = out == NCCL_EP_FLOAT32;
  if (!is_wide && asked == NCCL_EP_FLOAT8_E4M3) return DType::kFp8Blocks;
  if (!is_wide && asked == NCCL_EP_LOGFMT) return DType::kLogFmt;
  EP_CHECK(asked == NCCL_EP_FLOAT32, "wire_dtype is ", name_or_number(asked), ", must be ", name_of(out),
           " as the output tokens", is_wide ? "" : ", or float32, float8_e4m3 or NCCL_EP_LOGFMT");
  return DType::kF32;
}

template <class Params>
void set_out(Params& p, const ncclEpCombineInputs_t& inputs, const ncclEpCombineOutputs_t& outputs,
             const ncclEpCombineConfig_t& config) {
  const Sizes sizes{p.num_tokens, p.hidden};
  const Tensor out = take_tensor(outputs.tokens, "output tokens");
  EP_CHECK(out, "output tokens are not given, must be of shape ", text_of(sizes));
  check_tensor(out, "output tokens", out.dtype, sizes);
  check_aligned(out, "output tokens");
  p.out = out.data;
  p.options.out_dtype = to_dtype(out.dtype);
  p.options.wire_dtype = wire_type(config.wire_dtype, out.dtype);
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

template <class Params>
void set_combine(Params& p, const ncclEpHandle& handle, const ncclEpCombineInputs_t& inputs,
                 const ncclEpCombineOutputs_t& outputs, const ncclEpCombineConfig_t& config) {
  CombineOptions options;
  options.weighting = to_weighting(config.weights, handle.output.layout);
  options.num_sms = handle.num_sms(config.num_sms);
  options.rows_per_signal = config.rows_per_signal;
  options.signal_threshold = config.signal_threshold;
  if (config.scale != 0) options.scale = static_cast<float>(config.scale);
  ep::set_combine(p, handle.output, handle.shape.num_experts, handle.dispatched_tokens, options);
  set_rows(p, inputs);
  set_weights(p, inputs);
  set_out(p, inputs, outputs, config);
}

// Refuses outputs that overlap what the call reads, or one another. A bias may be the output itself: every element is
// read before it is written.
void check_apart(const ncclEpHandle& handle, const ncclEpCombineInputs_t& inputs,
                 const ncclEpCombineOutputs_t& outputs) {
  const Tensor rows = take_tensor(inputs.tokens, "tokens"), values = take_tensor(inputs.values, "values");
  const Tensor weights = take_tensor(inputs.topk_weights, "topk_weights");
  const Tensor ids = take_tensor(inputs.topk_idx, "topk_idx");
  const Tensor biases[] = {take_tensor(inputs.bias0, "bias0"), take_tensor(inputs.bias1, "bias1")};
  const Tensor out = take_tensor(outputs.tokens, "output tokens");
  const Tensor home_values = take_tensor(outputs.values, "output values");
  OverlapCheck check;
  check.reads("handle_mem", handle.memory_extent());
  check.reads("tokens", extent_of(rows));
  check.reads("values", extent_of(values));
  check.reads("topk_weights", extent_of(weights));
  check.reads("topk_idx", extent_of(ids));
  if (biases[0].data != out.data) check.reads("bias0", extent_of(biases[0]));
  if (biases[1].data != out.data) check.reads("bias1", extent_of(biases[1]));
  check.writes("output tokens", extent_of(out));
  check.writes("output values", extent_of(home_values));
}

// ---- Low latency

void set_signals(LlCombineParams& p, const ncclEpCombineInputs_t& inputs) {
  const Tensor counters = take_tensor(inputs.row_signals, "row_signals");
  p.signals = signals_of(p.output, p.options, static_cast<bool>(counters));
  if (!counters) return;
  check_tensor(counters, "row_signals", NCCL_EP_INT32, {p.output.local_experts, p.signals.per_expert()});
  p.signals.counters = static_cast<const uint32_t*>(counters.data);
}

void combine_ll(ncclEpHandle& handle, const ncclEpCombineInputs_t& inputs, const ncclEpCombineOutputs_t& outputs,
                const ncclEpCombineConfig_t& config, void* stream) {
  LlCombineParams p;
  EP_CHECK(!take_tensor(inputs.values, "values") && !take_tensor(outputs.values, "output values"),
           "values beside rows are high throughput's; ncclEpCombineWeights brings them home");
  set_combine(p, handle, inputs, outputs, config);
  p.phase = config.send_only ? Phase::kSend : Phase::kFused;
  set_signals(p, inputs);
  p.handle = handle.pointers(p.num_tokens);
  check_apart(handle, inputs, outputs);
  const ScopedDevice device(handle.device());
  handle.state->get().combine(p, stream);
  if (p.phase == Phase::kSend) {
    handle.combine = p;
    if (p.signals.counters != nullptr) handle.combine.options.num_sms = handle.num_sms(0);  // the send has all SMs
    handle.combine.signals = {};
    handle.pending = Pending::kCombine;
  }
}

// ---- High throughput

void set_values(HtCombineParams& p, const Tensor& values, const Tensor& out) {
  p.has_values = true;
  p.values = static_cast<const float*>(values.data);
  p.out_values = static_cast<float*>(out.data);
}

void combine_ht(const ncclEpHandle& handle, const ncclEpCombineInputs_t& inputs, const ncclEpCombineOutputs_t& outputs,
                const ncclEpCombineConfig_t& config, void* stream) {
  EP_CHECK(!config.send_only, "send_only is ", config.send_only,
           ", but the handle is of high throughput, which is not split");
  EP_CHECK(!take_tensor(inputs.row_signals, "row_signals"), "row_signals are of low latency");
  HtCombineParams p;
  set_combine(p, handle, inputs, outputs, config);
  p.handle = handle.ht_pointers(p.num_tokens);
  const Tensor values = take_tensor(inputs.values, "values"), home = take_tensor(outputs.values, "output values");
  EP_CHECK(values || !home, "output values are given, but no values");
  if (values) {
    check_values(handle, values, home, "output values");
    set_values(p, values, home);
  }
  check_apart(handle, inputs, outputs);
  const ScopedDevice device(handle.device());
  handle.state->get().combine(p, stream);
}

// ---- Both

void combine_weights(const ncclEpHandle& handle, const ncclEpTensor_t* given, const ncclEpTensor_t* given_out,
                     void* stream) {
  Group& group = handle.state->get();
  handle.require_dispatched();
  const Tensor values = take_tensor(given, "values"), out = take_tensor(given_out, "out");
  check_values(handle, values, out, "out");
  OverlapCheck check;
  check.reads("handle_mem", handle.memory_extent());
  check.reads("values", extent_of(values));
  check.writes("out", extent_of(out));
  const ScopedDevice device(handle.device());
  if (handle.is_ht) {
    HtCombineParams p;
    ep::set_combine(p, handle.output, handle.shape.num_experts, handle.dispatched_tokens,
                    {.num_sms = handle.num_sms(0)});
    p.handle = handle.ht_pointers(p.num_tokens);
    set_values(p, values, out);
    group.combine(p, stream);
    return;
  }
  LlCombineWeightsParams p;
  p.shape = handle.shape;
  p.output = handle.output;
  p.num_tokens = handle.dispatched_tokens;
  p.handle = handle.pointers(p.num_tokens);
  p.values = static_cast<const float*>(values.data);
  p.out = static_cast<float*>(out.data);
  group.combine_weights(p, stream);
}

void complete(ncclEpHandle& handle, void* stream) {
  Group& group = handle.state->get();
  EP_CHECK_USAGE(handle.pending != Pending::kNothing, "nothing was sent with this handle that could be received");
  const ScopedDevice device(handle.device());
  const Pending pending = handle.pending;
  if (pending == Pending::kDispatch) {
    handle.dispatch.phase = Phase::kRecv;
    group.dispatch(handle.dispatch, stream);
  } else {
    handle.combine.phase = Phase::kRecv;
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

ncclEpResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* given_inputs,
                             const ncclEpCombineOutputs_t* given_outputs, const ncclEpCombineConfig_t* given_config,
                             void* stream) {
  return guarded("ncclEpCombine", [&] {
    ncclEpHandle& object = object_of(handle);
    object.state->get();
    object.require_dispatched();
    const auto inputs = take(given_inputs, "inputs");
    const auto outputs = take(given_outputs, "outputs");
    const auto config = take_or_default(given_config, "config");
    check_flag(config.send_only, "send_only");
    if (object.is_ht) {
      combine_ht(object, inputs, outputs, config, stream);
    } else {
      combine_ll(object, inputs, outputs, config, stream);
    }
  });
}

ncclEpResult_t ncclEpCombineWeights(ncclEpHandle_t handle, const ncclEpTensor_t* values, const ncclEpTensor_t* out,
                                    void* stream) {
  return guarded("ncclEpCombineWeights", [&] { combine_weights(object_of(handle), values, out, stream); });
}

ncclEpResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, void* stream) {
  return guarded("ncclEpComplete", [&] {
    take_or_default(config, "config");
    complete(object_of(handle), stream);
  });
}

}  // extern "C"
