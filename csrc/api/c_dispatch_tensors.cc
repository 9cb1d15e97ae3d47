// The tensors of a dispatch: what the caller gives, and what must be there for the results.
#include <algorithm>

#include "api/c_dispatch.h"
#include "api/c_struct.h"
#include "runtime/checks.h"
#include "runtime/policy.h"

namespace ep::c {
namespace {

// NCCL_EPX_INFO_* are what the backends write.
constexpr OutputShape kSample{OutputLayout::kPacked, 2, 7, 1, 1, 1, 1};
static_assert(NCCL_EPX_INFO_DEMAND(7) == kSample.demand_at() && NCCL_EPX_INFO_OVERFLOW(7) == kSample.overflow_at() &&
              NCCL_EPX_INFO_TOTAL(7) == kSample.total_at() && NCCL_EPX_INFO_OFFSETS(7) == kSample.offsets_at() &&
              NCCL_EPX_INFO_SIZE(7) == kSample.offsets_at() &&
              NCCL_EPX_INFO_SIZE_PACKED(7) == kSample.offsets_at() + 7 + 1);
static_assert(NCCL_EPX_QUANT_FP8 == static_cast<int>(Quant::kFp8) &&
              NCCL_EPX_QUANT_FP8_ROUNDED == static_cast<int>(Quant::kFp8Rounded) &&
              NCCL_EPX_QUANT_FP8_UE8M0 == static_cast<int>(Quant::kFp8Ue8m0));

constexpr const char* kExtraNames[] = {"extra[0]", "extra[1]", "extra[2]"};
static_assert(std::size(kExtraNames) == NCCL_EPX_MAX_EXTRA);

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
  for (int i = 0; i < NCCL_EPX_MAX_EXTRA; i++) {
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

// The recipes of NCCL EP, and ours.
Quant quant_of(const DispatchCall& call, const ncclEpHandle& handle, const ncclEpDispatchConfig_t& config,
               ncclEpxQuant_t asked) {
  const uint32_t recipe = choice_of(config.quant_recipe, NCCL_EP_DISP_QUANT_DS_FP8E3M4, "quant_recipe");
  EP_CHECK(asked >= NCCL_EPX_QUANT_NONE && asked <= NCCL_EPX_QUANT_FP8_UE8M0, "quant ", asked, " is unknown");
  EP_CHECK(call.scales || recipe != NCCL_EP_DISP_QUANT_FWD,
           "scales are not given, but quant_recipe is NCCL_EP_DISP_QUANT_FWD");
  EP_CHECK(!call.scales || recipe == NCCL_EP_DISP_QUANT_FWD, "scales are given, but quant_recipe is ", recipe,
           ": NCCL_EP_DISP_QUANT_FWD sends them");
  EP_CHECK(config.round_scales == 0 || recipe != NCCL_EP_DISP_QUANT_FWD,
           "round_scales is set, but quant_recipe is NCCL_EP_DISP_QUANT_FWD, which sends scales as they are");
  if (recipe != NCCL_EP_DISP_QUANT_DS_FP8E3M4) return static_cast<Quant>(asked);
  EP_CHECK(asked == NCCL_EPX_QUANT_NONE, "quant is ", asked, ", but quant_recipe quantises, too");
  EP_CHECK(!handle.is_ht, "quant_recipe is NCCL_EP_DISP_QUANT_DS_FP8E3M4, which is of low latency");
  EP_CHECK(call.tokens.dtype == ncclBfloat16, "tokens are ", name_of(call.tokens.dtype),
           ", must be bfloat16 for NCCL_EP_DISP_QUANT_DS_FP8E3M4");
  EP_CHECK(call.tokens.sizes.at[1] % 128 == 0, "rows of ", call.tokens.sizes.at[1],
           " elements, must be a multiple of 128 for NCCL_EP_DISP_QUANT_DS_FP8E3M4");
  return config.round_scales != 0 ? Quant::kFp8Rounded : Quant::kFp8;
}

void check_extra(const DispatchCall& call, const ncclEpHandle& handle, const ncclEpxDispatchExtra_t& extra) {
  check_flag(extra.zero_padding, "zero_padding");
  check_flag(extra.cached, "cached");
  EP_CHECK(!call.is_cached || handle.is_ht, "cached is ", extra.cached, ", but the handle is of low latency");
  EP_CHECK(!call.is_cached || !call.weights, "topk_weights go with a routing, which a cached dispatch has not got");
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

DispatchCall take_call(const ncclEpHandle& handle, const ncclEpDispatchInputs_t& inputs,
                       const ncclEpDispatchConfig_t& config, const ncclEpxDispatchExtra_t& extra) {
  DispatchCall call;
  call.is_split = config.send_only != 0 && !handle.is_ht;  // high throughput has no split calls
  call.is_cached = extra.cached == 1;
  call.is_backward = choice_of(config.pass_direction, NCCL_EP_BWD_PASS, "pass_direction") == NCCL_EP_BWD_PASS;
  EP_CHECK_USAGE(!call.is_backward || handle.is_ht,
                 "pass_direction is NCCL_EP_BWD_PASS, but the handle is of low "
                 "latency, whose backward is another dispatch of the same ids");
  EP_CHECK(!call.is_backward || handle.is_plain,
           "pass_direction is NCCL_EP_BWD_PASS, but the handle has options: cached of ncclEpxDispatchExtra_t does it");
  call.tokens = take_tensor(inputs.tokens, "tokens");
  call.weights = take_tensor(inputs.topk_weights, "topk_weights");
  call.scales = take_tensor(inputs.scales, "scales");
  if (call.scales && (extra.scale_strides[0] != 0 || extra.scale_strides[1] != 0)) {
    std::copy_n(extra.scale_strides, 2, call.scales.strides.begin());
  }
  for (int i = 0; i < NCCL_EPX_MAX_EXTRA; i++) call.extra[i] = take_tensor(extra.extra[i], kExtraNames[i]);
  check_sizes(call);
  check_extra(call, handle, extra);
  call.options.quant = quant_of(call, handle, config, extra.quant);
  call.options.zero_padding = extra.zero_padding != 0 || (handle.is_plain && handle.output.alignment > 1);
  call.options.all_weights = handle.is_plain && !handle.is_ht && handle.output.layout == OutputLayout::kRankMajor;
  call.options.num_sms = handle.num_sms(extra.num_sms);
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
           call.is_cached ? ", the dispatch of the handle had " : ", topk_idx has ", num_tokens, " tokens");
  const auto check_rows = [](const Tensor& tensor, const char* name) {
    check_contiguous(tensor, name);
    check_data(tensor, name);
    check_aligned(tensor, name);
  };
  check_rows(x, "tokens");
  if (call.weights) check_tensor(call.weights, "topk_weights", ncclFloat32, {num_tokens, handle.shape.topk});
  if (call.scales) {
    check_data(call.scales, "scales");
    check_scales(call.options.quant, true);
  }
  for (int i = 0; i < NCCL_EPX_MAX_EXTRA; i++) {
    if (call.extra[i]) check_rows(call.extra[i], kExtraNames[i]);
  }
}

Outputs outputs_of(const DispatchCall& call, const ncclEpHandle& handle, const ncclEpDispatchOutputs_t& given,
                   const ncclEpxDispatchExtra_t& extra) {
  const OutputShape& output = handle.output;
  const bool quantises = call.options.quant != Quant::kNone;
  const bool has_routing = !call.is_cached, has_info = has_routing && !handle.is_routed;
  const auto dims =
      DispatchDims<int64_t>::of(output, output.capacity, call.options.quant, call.hidden, call.num_scales);
  const Sizes rows = sizes_of(dims.rows), none;
  const DataType scale_type = call.options.quant == Quant::kFp8Ue8m0 ? ncclInt32
                              : quantises                            ? ncclFloat32
                                                                     : call.scales.dtype;
  Outputs outputs{{
      {"tokens", given.tokens, quantises ? ncclFloat8e4m3 : call.tokens.dtype, sizes_of(dims.x)},
      {"scales", given.scales, scale_type, sizes_of(dims.scales)},
      {"topk_weights", given.topk_weights, ncclFloat32, has_routing ? sizes_of(dims.weights) : none},
      {"topk_idx", given.topk_idx, handle.is_idx64 ? ncclInt64 : ncclInt32,
       has_routing ? sizes_of(dims.topk_idx) : none},
      {"row_expert", extra.row_expert, ncclInt32, has_routing ? sizes_of(dims.row_expert) : none},
      {"info", extra.info, ncclInt32, has_info ? sizes_of(dims.info) : none},
  }};
  for (int i = 0; i < NCCL_EPX_MAX_EXTRA; i++) {
    const Tensor& in = call.extra[i];
    outputs[kExtra + i] = {kExtraNames[i], extra.extra_outputs[i], in.dtype, in ? rows.with(in.sizes.at[1]) : none};
  }
  if (!handle.is_plain) return outputs;
  outputs[kWeights].scratch = handle.scratch.weights;
  outputs[kIdx].scratch = handle.scratch.ids;
  outputs[kRowExpert].scratch = handle.scratch.row_expert;
  outputs[kInfo].scratch = handle.scratch.info;
  for (Output& output : outputs) output.is_least = handle.is_ht;
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
    if (!tensor && output.scratch != nullptr) {
      pointers[i] = output.scratch;
      continue;
    }
    check_tensor(tensor, name.c_str(), output.dtype, output.sizes, output.is_least);
    if (i == kTokens || i >= kExtra) check_aligned(tensor, name.c_str());
    pointers[i] = tensor.data;
  }
  return pointers;
}

void check_apart(const DispatchCall& call, const ncclEpHandle& handle, const Outputs& outputs,
                 const OutputPointers& pointers) {
  const bool is_cached = call.is_cached;
  OverlapCheck check;
  check.reads("tokens", extent_of(call.tokens));
  check.reads("topk_weights", extent_of(call.weights));
  check.reads("scales", extent_of(call.scales));
  for (int i = 0; i < NCCL_EPX_MAX_EXTRA; i++) check.reads(kExtraNames[i], extent_of(call.extra[i]));
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
