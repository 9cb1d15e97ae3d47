// The tensors of a dispatch: what the caller gives, and what must be there for the results.
#include "api/c_dispatch.h"
#include "api/c_struct.h"
#include "runtime/checks.h"
#include "runtime/policy.h"

namespace ep::c {
namespace {

// NCCL_EP_INFO_* are what the backends write.
constexpr OutputShape kSample{OutputLayout::kPacked, 2, 7, 1, 1, 1, 1};
static_assert(NCCL_EP_INFO_DEMAND(7) == kSample.demand_at() && NCCL_EP_INFO_OVERFLOW(7) == kSample.overflow_at() &&
              NCCL_EP_INFO_TOTAL(7) == kSample.total_at() && NCCL_EP_INFO_OFFSETS(7) == kSample.offsets_at() &&
              NCCL_EP_INFO_SIZE(7) == kSample.offsets_at() &&
              NCCL_EP_INFO_SIZE_PACKED(7) == kSample.offsets_at() + 7 + 1);
static_assert(NCCL_EP_QUANT_FP8 == static_cast<int>(Quant::kFp8) &&
              NCCL_EP_QUANT_FP8_ROUNDED == static_cast<int>(Quant::kFp8Rounded) &&
              NCCL_EP_QUANT_FP8_UE8M0 == static_cast<int>(Quant::kFp8Ue8m0));

constexpr const char* kExtraNames[] = {"extra[0]", "extra[1]", "extra[2]"};
static_assert(std::size(kExtraNames) == NCCL_EP_MAX_EXTRA);

void check_sizes(const DispatchCall& call) {
  const Sizes& tokens = call.tokens.sizes;
  EP_CHECK(tokens.ndim == 2, "tokens have shape ", text_of(tokens), ", must be [tokens, hidden]");
  EP_CHECK(tokens.at[1] <= kMaxRowBytes, "rows of ", tokens.at[1], " elements, at most ", kMaxRowBytes, " bytes");
  if (call.scales) {
    const Sizes& scales = call.scales.sizes;
    EP_CHECK(scales.ndim == 2 && scales.at[0] == tokens.at[0], "scales have shape ", text_of(scales), ", must be [",
             tokens.at[0], ", scales of a row]");
    EP_CHECK(scales.at[1] >= 1 && scales.at[1] <= kMaxRowBytes, "scales have shape ", text_of(scales), ": 1 to ",
             kMaxRowBytes, " of a row");
  }
  for (int i = 0; i < NCCL_EP_MAX_EXTRA; i++) {
    const Tensor& extra = call.extra[i];
    if (!extra) continue;
    EP_CHECK(extra.sizes.ndim == 2 && extra.sizes.at[0] == tokens.at[0], kExtraNames[i], " has shape ",
             text_of(extra.sizes), ", must be [", tokens.at[0], ", elements of a row]");
    const int64_t elements = extra.sizes.at[1];
    const int64_t bytes = elements * element_bytes(extra.dtype);
    EP_CHECK(elements >= 1 && elements <= kMaxRowBytes && bytes % 16 == 0 && bytes <= kMaxRowBytes, kExtraNames[i],
             " has rows of ", elements, " elements of ", element_bytes(extra.dtype),
             " bytes: must be a multiple of 16 bytes, at most ", kMaxRowBytes);
  }
}

void check_config(const DispatchCall& call, const ncclEpHandle& handle) {
  const ncclEpDispatchConfig_t& config = call.config;
  check_reserved(config);
  check_flag(config.send_only, "send_only");
  check_flag(config.zero_padding, "zero_padding");
  check_flag(config.cached, "cached");
  EP_CHECK(config.quant >= NCCL_EP_QUANT_NONE && config.quant <= NCCL_EP_QUANT_FP8_UE8M0, "quant ", config.quant,
           " is unknown");
  EP_CHECK(!config.send_only || !handle.is_ht, "send_only is ", config.send_only,
           ", but the handle is of high throughput, which is not split");
  EP_CHECK(!config.cached || handle.is_ht, "cached is ", config.cached, ", but the handle is of low latency");
  EP_CHECK(!config.cached || !call.weights, "topk_weights go with a routing, which a cached dispatch has not got");
}

}  // namespace

Sizes sizes_of(const Dims<int64_t>& dims) {
  Sizes sizes;
  for (int i = 0; i < dims.ndim; i++) sizes = sizes.with(dims.at[i]);
  return sizes;
}

Sizes row_sizes(const OutputShape& output) {
  return sizes_of(DispatchDims<int64_t>::of(output, output.capacity, Quant::kNone, 1, 0).rows);
}

DispatchCall take_call(const ncclEpHandle& handle, const ncclEpDispatchInputs_t* given_inputs,
                       const ncclEpDispatchConfig_t* given_config) {
  const auto inputs = take(given_inputs, "inputs");
  DispatchCall call;
  call.config = take_or_default(given_config, "config");
  call.tokens = take_tensor(inputs.tokens, "tokens");
  call.weights = take_tensor(inputs.topk_weights, "topk_weights");
  call.scales = take_tensor(inputs.scales, "scales");
  for (int i = 0; i < NCCL_EP_MAX_EXTRA; i++) call.extra[i] = take_tensor(inputs.extra[i], kExtraNames[i]);
  check_sizes(call);
  check_config(call, handle);
  call.options.quant = static_cast<Quant>(call.config.quant);
  call.options.zero_padding = call.config.zero_padding != 0;
  call.options.num_sms = handle.num_sms(call.config.num_sms);
  call.dtype = to_dtype(call.tokens.dtype);
  call.hidden = static_cast<int>(call.tokens.sizes.at[1]);
  if (call.options.quant != Quant::kNone) {
    call.num_scales = num_quant_scales(call.options.quant, call.hidden);
  } else if (call.scales) {
    call.num_scales = static_cast<int>(call.scales.sizes.at[1]);
    call.scale_bytes = element_bytes(call.scales.dtype);
  }
  return call;
}

void check_inputs(const DispatchCall& call, const ncclEpHandle& handle, int num_tokens) {
  const Tensor& x = call.tokens;
  EP_CHECK(x.sizes.at[0] == num_tokens, "tokens have shape ", text_of(x.sizes),
           call.config.cached ? ", the dispatch of the handle had " : ", topk_idx has ", num_tokens, " tokens");
  const auto check_rows = [](const Tensor& tensor, const char* name) {
    check_contiguous(tensor, name);
    check_data(tensor, name);
    check_aligned(tensor, name);
  };
  check_rows(x, "tokens");
  if (call.weights) check_tensor(call.weights, "topk_weights", NCCL_EP_FLOAT32, {num_tokens, handle.shape.topk});
  if (call.scales) {
    check_data(call.scales, "scales");
    check_scales(call.options.quant, true);
  }
  for (int i = 0; i < NCCL_EP_MAX_EXTRA; i++) {
    if (call.extra[i]) check_rows(call.extra[i], kExtraNames[i]);
  }
}

Outputs outputs_of(const DispatchCall& call, const ncclEpHandle& handle, const ncclEpDispatchOutputs_t& given) {
  const OutputShape& output = handle.output;
  const bool quantises = call.options.quant != Quant::kNone;
  const bool has_routing = !call.config.cached, has_info = has_routing && !handle.is_routed;
  const auto dims =
      DispatchDims<int64_t>::of(output, output.capacity, call.options.quant, call.hidden, call.num_scales);
  const Sizes rows = sizes_of(dims.rows), none;
  const ncclEpDataType_t scale_type = call.options.quant == Quant::kFp8Ue8m0 ? NCCL_EP_INT32
                                      : quantises                            ? NCCL_EP_FLOAT32
                                                                             : call.scales.dtype;
  Outputs outputs{{
      {"tokens", given.tokens, quantises ? NCCL_EP_FLOAT8_E4M3 : call.tokens.dtype, sizes_of(dims.x)},
      {"scales", given.scales, scale_type, sizes_of(dims.scales)},
      {"topk_weights", given.topk_weights, NCCL_EP_FLOAT32, has_routing ? sizes_of(dims.weights) : none},
      {"topk_idx", given.topk_idx, handle.is_idx64 ? NCCL_EP_INT64 : NCCL_EP_INT32,
       has_routing ? sizes_of(dims.topk_idx) : none},
      {"row_expert", given.row_expert, NCCL_EP_INT32, has_routing ? sizes_of(dims.row_expert) : none},
      {"info", given.info, NCCL_EP_INT32, has_info ? sizes_of(dims.info) : none},
  }};
  for (int i = 0; i < NCCL_EP_MAX_EXTRA; i++) {
    const Tensor& extra = call.extra[i];
    outputs[kExtra + i] = {kExtraNames[i], given.extra[i], extra.dtype, extra ? rows.with(extra.sizes.at[1]) : none};
  }
  return outputs;
}

OutputPointers take_outputs(const Outputs& outputs) {
  OutputPointers pointers{};
  for (int i = 0; i < kNumOutputs; i++) {
    const Output& output = outputs[i];
    const std::string name = concat("output ", output.name);
    const Tensor tensor = take_tensor(output.given, name.c_str());
    if (output.sizes.ndim == 0) {
      EP_CHECK(!tensor, name, " is given, but this call has none");
      continue;
    }
    check_tensor(tensor, name.c_str(), output.dtype, output.sizes);
    if (i == kTokens || i >= kExtra) check_aligned(tensor, name.c_str());
    pointers[i] = tensor.data;
  }
  return pointers;
}

void check_apart(const DispatchCall& call, const ncclEpHandle& handle, const Outputs& outputs,
                 const OutputPointers& pointers) {
  const bool is_cached = call.config.cached != 0;
  OverlapCheck check;
  check.reads("tokens", extent_of(call.tokens));
  check.reads("topk_weights", extent_of(call.weights));
  check.reads("scales", extent_of(call.scales));
  for (int i = 0; i < NCCL_EP_MAX_EXTRA; i++) check.reads(kExtraNames[i], extent_of(call.extra[i]));
  if (!is_cached && !handle.is_routed) check.reads("topk_idx", handle.ids_extent());
  if (is_cached) {
    check.reads("handle_mem", handle.memory_extent());
  } else {
    check.writes("handle_mem", handle.memory_extent());
  }
  constexpr const char* kNames[] = {"output tokens",   "output scales",     "output topk_weights",
                                    "output topk_idx", "output row_expert", "output info",
                                    "output extra[0]", "output extra[1]",   "output extra[2]"};
  static_assert(std::size(kNames) == kNumOutputs);
  for (int i = 0; i < kNumOutputs; i++) {
    if (outputs[i].sizes.ndim == 0) continue;
    const Sizes& sizes = outputs[i].sizes;
    const auto bytes = static_cast<uint64_t>(sizes.count()) * element_bytes(outputs[i].dtype);
    check.writes(kNames[i], {pointers[i], bytes, sizes.at.data(), sizes.ndim});
  }
}

}  // namespace ep::c
