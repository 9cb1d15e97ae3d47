// ncclEpCombine, ncclEpxCombineWeights, and ncclEpComplete for both operations.
#include "api/c_device.h"
#include "api/c_dispatch.h"
#include "api/c_struct.h"
#include "runtime/call.h"
#include "runtime/policy.h"

namespace ep::c {
namespace {

// The structs of a call.
struct CombineCall {
  ncclEpCombineInputs_t inputs;
  ncclEpCombineOutputs_t outputs;
  ncclEpCombineConfig_t config;
  ncclEpxCombineExtra_t extra;
  bool is_split = false, is_backward = false;
  const ncclEpTensor_t* home_weights = nullptr;  // read

  // Of a backward pass: beside the rows.
  const ncclEpTensor_t* values() const { return is_backward ? inputs.topk_weights : nullptr; }
  const ncclEpTensor_t* home_values() const { return is_backward ? outputs.topk_weights : nullptr; }
};

// As NCCL EP weights, if nobody says otherwise: in low latency by the weights of the tokens' home.
ncclEpxWeights_t weights_of(const CombineCall& call, const ncclEpHandle& handle) {
  const ncclEpxWeights_t asked = call.extra.weights;
  EP_CHECK(asked >= NCCL_EPX_WEIGHTS_AUTO && asked <= NCCL_EPX_WEIGHTS_HOME, "weights ", asked, " is unknown");
  if (asked != NCCL_EPX_WEIGHTS_AUTO) return asked;
  const bool is_home = !handle.is_ht && has_expert_rows(handle.output.layout);
  return is_home ? NCCL_EPX_WEIGHTS_HOME : NCCL_EPX_WEIGHTS_NONE;
}

Weighting to_weighting(ncclEpxWeights_t weights, OutputLayout layout) {
  switch (weights) {
    case NCCL_EPX_WEIGHTS_DISPATCH:
      return weighting_by_dispatch(layout);
    case NCCL_EPX_WEIGHTS_HOME:
      return Weighting::kHome;
    default:
      return Weighting::kNone;
  }
}

CombineCall take_call(const ncclEpHandle& handle, const ncclEpCombineInputs_t* inputs,
                      const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                      const ncclEpxCombineExtra_t* extra) {
  CombineCall call{take(inputs, "inputs"), take(outputs, "outputs"), take_or_default(config, "config"),
                   take_or_default(extra, "extra")};
  check_reserved(call.extra);
  EP_CHECK_USAGE(
      choice_of(call.config.quant_recipe, NCCL_EP_COMB_QUANT_NVFP4, "quant_recipe") == NCCL_EP_COMB_QUANT_NONE,
      "quant_recipe is NCCL_EP_COMB_QUANT_NVFP4, which this library has not got: wire_dtype of "
      "ncclEpxCombineExtra_t has e4m3 and LogFMT");
  EP_CHECK(call.inputs.scales == nullptr, "scales are given, but quant_recipe is NCCL_EP_COMB_QUANT_NONE");
  call.is_split = call.config.send_only != 0 && !handle.is_ht;
  call.is_backward = choice_of(call.config.pass_direction, NCCL_EP_BWD_PASS, "pass_direction") == NCCL_EP_BWD_PASS;
  EP_CHECK_USAGE(!call.is_backward || handle.is_ht,
                 "pass_direction is NCCL_EP_BWD_PASS, but the handle is of low latency: ncclEpxCombineWeights brings "
                 "values home");
  EP_CHECK(call.is_backward || call.inputs.topk_weights == nullptr,
           "topk_weights of the inputs are given, but pass_direction is NCCL_EP_FWD_PASS");
  call.extra.weights = weights_of(call, handle);
  call.home_weights = call.extra.topk_weights;
  const bool is_home = call.extra.weights == NCCL_EPX_WEIGHTS_HOME;
  if (is_home && call.home_weights == nullptr && !call.is_backward) call.home_weights = call.outputs.topk_weights;
  EP_CHECK(is_home || (call.extra.topk_weights == nullptr && call.extra.topk_idx == nullptr),
           "topk_weights and topk_idx of a combine go with NCCL_EPX_WEIGHTS_HOME");
  return call;
}

// Sizes of scalars for each row, or for each choice of it.
Sizes values_of(const OutputShape& output) {
  const Sizes rows = row_sizes(output);
  return has_expert_rows(output.layout) ? rows : rows.with(output.topk);
}

void check_values(const ncclEpHandle& handle, const Tensor& values, const Tensor& out, const char* name,
                  const char* out_name) {
  check_tensor(values, name, ncclFloat32, values_of(handle.output), handle.is_plain && handle.is_ht);
  check_tensor(out, out_name, ncclFloat32, {handle.dispatched_tokens, handle.shape.topk});
}

// ---- What the parameters of both algorithms have in common.

constexpr const char* kBiasNames[] = {"bias[0]", "bias[1]"};

template <class Params>
void set_rows(Params& p, const CombineCall& call, bool is_least) {
  const Tensor rows = take_tensor(call.inputs.tokens, "tokens");
  EP_CHECK(rows, "tokens are not given");
  const int64_t hidden = rows.sizes.last();
  EP_CHECK(hidden <= INT32_MAX, "rows of ", hidden, " elements");
  check_tensor(rows, "tokens", rows.dtype, row_sizes(p.output).with(hidden), is_least);
  check_aligned(rows, "tokens");
  p.rows = rows.data;
  p.dtype = to_dtype(rows.dtype);
  p.hidden = static_cast<int>(hidden);
}

template <class Params>
void set_weights(Params& p, const CombineCall& call) {
  if (p.options.weighting != Weighting::kHome) return;
  const Sizes choices{p.num_tokens, p.shape.topk};
  const Tensor weights = take_tensor(call.home_weights, "topk_weights");
  check_tensor(weights, "topk_weights", ncclFloat32, choices);
  p.home_weights = static_cast<const float*>(weights.data);
  const Tensor ids = take_tensor(call.extra.topk_idx, "topk_idx");
  if (!ids) return;
  check_id_type(ids);
  check_tensor(ids, "topk_idx", ids.dtype, choices);
  p.is_idx64 = ids.dtype == ncclInt64;
  p.home_topk_idx = ids.data;
}

DType wire_type(ncclEpxWire_t asked, DataType out) {
  constexpr const char* kNames[] = {"as the output", "float32", "float8_e4m3", "LogFMT"};
  EP_CHECK(asked >= NCCL_EPX_WIRE_AUTO && asked <= NCCL_EPX_WIRE_LOGFMT, "wire_dtype ", asked, " is unknown");
  if (asked == NCCL_EPX_WIRE_AUTO) return to_dtype(out);
  const bool is_block = asked != NCCL_EPX_WIRE_FLOAT32;
  EP_CHECK(!is_block || out != ncclFloat32, "wire_dtype is ", kNames[asked], ", must be float32 as the output tokens");
  return !is_block ? DType::kF32 : asked == NCCL_EPX_WIRE_LOGFMT ? DType::kLogFmt : DType::kFp8Blocks;
}

template <class Params>
void set_out(Params& p, const CombineCall& call) {
  const Sizes sizes{p.num_tokens, p.hidden};
  const Tensor out = take_tensor(call.outputs.tokens, "output tokens");
  EP_CHECK(out, "output tokens are not given, must be of shape ", text_of(sizes));
  check_tensor(out, "output tokens", out.dtype, sizes);
  check_aligned(out, "output tokens");
  p.out = out.data;
  p.options.out_dtype = to_dtype(out.dtype);
  p.options.wire_dtype = wire_type(call.extra.wire_dtype, out.dtype);
  for (int i = 0; i < 2; i++) {
    const char* name = kBiasNames[i];
    const Tensor bias = take_tensor(call.extra.bias[i], name);
    if (!bias) continue;
    check_tensor(bias, name, out.dtype, sizes);
    check_aligned(bias, name);
    p.bias[i] = bias.data;
  }
}

template <class Params>
void set_combine(Params& p, const ncclEpHandle& handle, const CombineCall& call) {
  CombineOptions options;
  options.weighting = to_weighting(call.extra.weights, handle.output.layout);
  options.num_sms = handle.num_sms(call.extra.num_sms);
  options.rows_per_signal = call.extra.rows_per_signal;
  options.signal_threshold = call.extra.signal_threshold;
  if (call.extra.scale != 0) options.scale = static_cast<float>(call.extra.scale);
  ep::set_combine(p, handle.output, handle.shape.num_experts, handle.dispatched_tokens, options);
  set_rows(p, call, handle.is_plain && handle.is_ht);
  set_weights(p, call);
  set_out(p, call);
}

// Refuses outputs that overlap what the call reads, or one another. A bias may be the output itself: every element is
// read before it is written.
void check_apart(const ncclEpHandle& handle, const CombineCall& call) {
  const Tensor rows = take_tensor(call.inputs.tokens, "tokens"), values = take_tensor(call.values(), "values");
  const Tensor weights = take_tensor(call.home_weights, "topk_weights");
  const Tensor ids = take_tensor(call.extra.topk_idx, "topk_idx");
  const Tensor biases[] = {take_tensor(call.extra.bias[0], kBiasNames[0]),
                           take_tensor(call.extra.bias[1], kBiasNames[1])};
  const Tensor out = take_tensor(call.outputs.tokens, "output tokens");
  const Tensor home_values = take_tensor(call.home_values(), "output topk_weights");
  OverlapCheck check;
  check.reads("handle_mem", handle.memory_extent());
  check.reads("tokens", extent_of(rows));
  check.reads("values of topk_weights", extent_of(values));
  check.reads("topk_weights", extent_of(weights));
  check.reads("topk_idx", extent_of(ids));
  if (biases[0].data != out.data) check.reads(kBiasNames[0], extent_of(biases[0]));
  if (biases[1].data != out.data) check.reads(kBiasNames[1], extent_of(biases[1]));
  check.writes("output tokens", extent_of(out));
  check.writes("output topk_weights", extent_of(home_values));
}

template <class Params>
void set_signals(Params& p, const CombineCall& call) {
  const Tensor counters = take_tensor(call.extra.row_signals, "row_signals");
  p.signals = signals_of(p.output, p.options, static_cast<bool>(counters));
  if (!counters) return;
  if (p.signals.is_packed) {
    check_tensor(counters, "row_signals", ncclInt32, {p.signals.per_expert()});
  } else {
    check_tensor(counters, "row_signals", ncclInt32, {p.signals.experts, p.signals.per_expert()});
  }
  p.signals.counters = static_cast<const uint32_t*>(counters.data);
}

// ---- Low latency

void combine_ll(ncclEpHandle& handle, const CombineCall& call, void* stream) {
  LlCombineParams p;
  set_combine(p, handle, call);
  p.phase = call.is_split ? Phase::kSend : Phase::kFused;
  set_signals(p, call);
  p.handle = handle.pointers(p.num_tokens);
  check_apart(handle, call);
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

void combine_ht(const ncclEpHandle& handle, const CombineCall& call, void* stream) {
  HtCombineParams p;
  set_combine(p, handle, call);
  set_signals(p, call);
  p.handle = handle.ht_pointers(p.num_tokens);
  if (call.is_backward) {
    const Tensor values = take_tensor(call.values(), "topk_weights");
    const Tensor home = take_tensor(call.home_values(), "output topk_weights");
    check_values(handle, values, home, "topk_weights", "output topk_weights");
    set_values(p, values, home);
  }
  check_apart(handle, call);
  const ScopedDevice device(handle.device());
  handle.state->get().combine(p, stream);
}

// ---- Both

// A handle on memory with the routing of another one answers that one's dispatch.
void adopt_for_combine(ncclEpHandle& handle, const CombineCall& call) {
  if (!handle.is_ht || handle.owns_memory || handle.given_tokens >= 0) return;
  const Tensor rows = take_tensor(call.inputs.tokens, "tokens");
  const Tensor out = take_tensor(call.outputs.tokens, "output tokens");
  adopt_memory(handle, out.sizes.at[0], rows.sizes.at[0]);
  handle.dispatched_tokens = handle.given_tokens;
}

void combine_weights(const ncclEpHandle& handle, const ncclEpTensor_t* given, const ncclEpTensor_t* given_out,
                     void* stream) {
  Group& group = handle.state->get();
  handle.require_dispatched();
  const Tensor values = take_tensor(given, "values"), out = take_tensor(given_out, "out");
  check_values(handle, values, out, "values", "out");
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
  if (handle.pending == Pending::kNothing) return;
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
  if (pending != Pending::kDispatch) return;
  write_info(handle, handle.layout_info, stream);
  if (handle.device() < 0) handle.state->check_overflow();
}

void combine(ncclEpHandle_t given, const ncclEpCombineInputs_t* inputs, const ncclEpCombineOutputs_t* outputs,
             const ncclEpCombineConfig_t* config, const ncclEpxCombineExtra_t* extra, void* stream) {
  ncclEpHandle& handle = object_of(given);
  handle.state->get();
  const WindowScope windows(handle.state->comm);
  const CombineCall call = take_call(handle, inputs, outputs, config, extra);
  if (handle.is_plain) {
    check_plain_combine(handle, call.inputs, call.is_backward);
    adopt_for_combine(handle, call);
  }
  handle.require_dispatched();
  if (handle.is_ht) {
    combine_ht(handle, call, stream);
  } else {
    combine_ll(handle, call, stream);
  }
}

}  // namespace
}  // namespace ep::c

using namespace ep;
using namespace ep::c;

extern "C" {

ncclResult_t ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                           const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                           cudaStream_t stream) {
  return guarded("ncclEpCombine", [&] { combine(handle, inputs, outputs, config, nullptr, stream); });
}

ncclResult_t ncclEpxCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t* inputs,
                            const ncclEpCombineOutputs_t* outputs, const ncclEpCombineConfig_t* config,
                            const ncclEpxCombineExtra_t* extra, cudaStream_t stream) {
  return guarded("ncclEpxCombine", [&] { combine(handle, inputs, outputs, config, extra, stream); });
}

ncclResult_t ncclEpxCombineWeights(ncclEpHandle_t handle, const ncclEpTensor_t* values, const ncclEpTensor_t* out,
                                   cudaStream_t stream) {
  return guarded("ncclEpxCombineWeights", [&] { combine_weights(object_of(handle), values, out, stream); });
}

ncclResult_t ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t* config, cudaStream_t stream) {
  return guarded("ncclEpComplete", [&] {
    take_or_default(config, "config");
    complete(object_of(handle), stream);
  });
}

}  // extern "C"
