// ncclEpDispatch, and the tensors that it fills.
#include "api/c_device.h"
#include "api/c_objects.h"
#include "api/c_struct.h"
#include "api/c_tensor.h"
#include "cpu/rows.h"

namespace ep::c {
namespace {

// NCCL_EP_INFO_* are what the backends write.
constexpr OutputShape kSample{OutputLayout::kPacked, 2, 7, 1, 1, 1, 1};
static_assert(NCCL_EP_INFO_DEMAND(7) == kSample.demand_at() && NCCL_EP_INFO_OVERFLOW(7) == kSample.overflow_at() &&
              NCCL_EP_INFO_TOTAL(7) == kSample.total_at() && NCCL_EP_INFO_OFFSETS(7) == kSample.offsets_at());
static_assert(NCCL_EP_QUANT_FP8 == static_cast<int>(Quant::kFp8) &&
              NCCL_EP_QUANT_FP8_ROUNDED == static_cast<int>(Quant::kFp8Rounded) &&
              NCCL_EP_QUANT_FP8_UE8M0 == static_cast<int>(Quant::kFp8Ue8m0));

struct Inputs {
  Tensor tokens, weights, scales;
};

// An output as it must be; ndim 0: the call has none.
struct Output {
  const char* name;
  ncclEpTensor_t* ncclEpDispatchOutputs_t::*field;
  ncclEpDataType_t dtype;
  Sizes sizes;
};
enum { kTokens, kScales, kWeights, kIdx, kRowExpert, kInfo, kNumOutputs };
using Outputs = std::array<Output, kNumOutputs>;

Sizes row_sizes(const OutputShape& output) {
  if (output.layout == OutputLayout::kExpertMajor) return {output.local_experts, output.capacity};
  if (output.layout == OutputLayout::kRankMajor) return {output.num_ranks, output.max_tokens};
  return {output.capacity};
}

Inputs take_inputs(const ncclEpDispatchInputs_t* given) {
  const auto inputs = take(given, "inputs");
  Inputs taken{take_tensor(inputs.tokens, "tokens"), take_tensor(inputs.topk_weights, "topk_weights"),
               take_tensor(inputs.scales, "scales")};
  EP_CHECK(taken.tokens.sizes.ndim == 2, "tokens have shape ", text_of(taken.tokens.sizes),
           ", must be [tokens, hidden]");
  EP_CHECK(taken.tokens.sizes.at[1] <= INT32_MAX, "rows of ", taken.tokens.sizes.at[1], " elements");
  if (taken.scales) {
    EP_CHECK(taken.scales.sizes.ndim == 2 && taken.scales.sizes.at[0] == taken.tokens.sizes.at[0], "scales have shape ",
             text_of(taken.scales.sizes), ", must be [", taken.tokens.sizes.at[0], ", scales of a row]");
    EP_CHECK(taken.scales.sizes.at[1] >= 1 && taken.scales.sizes.at[1] <= 65536, "scales have shape ",
             text_of(taken.scales.sizes), ": 1 to 65536 of a row");
  }
  return taken;
}

// All but what is read and written.
LlDispatchParams make_params(const ncclEpHandle& handle, const Inputs& inputs, const ncclEpDispatchConfig_t& config) {
  EP_CHECK(config.quant >= NCCL_EP_QUANT_NONE && config.quant <= NCCL_EP_QUANT_FP8_UE8M0, "quant ", config.quant,
           " is unknown");
  LlDispatchParams p;
  p.shape = handle.shape;
  p.output = handle.output;
  p.half = config.send_only ? Half::kSend : Half::kBoth;
  p.quant = static_cast<Quant>(config.quant);
  p.dtype = to_dtype(inputs.tokens.dtype);
  p.hidden = static_cast<int>(inputs.tokens.sizes.at[1]);
  p.is_idx64 = handle.is_idx64;
  p.zero_padding = config.zero_padding != 0;
  p.num_sms = handle.num_sms(config.num_sms);
  if (p.quant != Quant::kNone) {
    p.out_scales.count = quant_scale_bytes(p.quant, p.hidden) / 4;
  } else if (inputs.scales) {
    p.out_scales.count = static_cast<int>(inputs.scales.sizes.at[1]);
    p.out_scales.element_bytes = element_bytes(inputs.scales.dtype);
  }
  p.out_scales.row_stride = p.out_scales.count;
  p.out_scales.group_stride = 1;
  return p;
}

Outputs outputs_of(const LlDispatchParams& p, const Inputs& inputs) {
  using O = ncclEpDispatchOutputs_t;
  const bool quantises = p.quant != Quant::kNone, expert_rows = has_expert_rows(p.output.layout);
  const Sizes rows = row_sizes(p.output), none, choices = rows.with(p.shape.topk);
  const ncclEpDataType_t scale_type = p.quant == Quant::kFp8Ue8m0 ? NCCL_EP_INT32
                                      : quantises                 ? NCCL_EP_FLOAT32
                                                                  : inputs.scales.dtype;
  return {{
      {"tokens", &O::tokens, quantises ? NCCL_EP_FLOAT8_E4M3 : inputs.tokens.dtype, rows.with(p.hidden)},
      {"scales", &O::scales, scale_type, p.out_scales.count > 0 ? rows.with(p.out_scales.count) : none},
      {"topk_weights", &O::topk_weights, NCCL_EP_FLOAT32, expert_rows ? rows : choices},
      {"topk_idx", &O::topk_idx, p.is_idx64 ? NCCL_EP_INT64 : NCCL_EP_INT32, expert_rows ? none : choices},
      {"row_expert", &O::row_expert, NCCL_EP_INT32, p.output.layout == OutputLayout::kPacked ? rows : none},
      {"info", &O::info, NCCL_EP_INT32, {p.output.info_size()}},
  }};
}

// Descriptors that are given are filled; a caller's struct stays its own but for ndim, dtype and sizes.
void fill(ncclEpTensor_t* given, const Output& output) {
  if (given == nullptr) return;
  ncclEpTensor_t full = take(given, output.name);
  full.ndim = output.sizes.ndim;
  full.dtype = output.sizes.ndim > 0 ? output.dtype : NCCL_EP_DTYPE_AUTO;
  std::copy(output.sizes.at.begin(), output.sizes.at.end(), full.sizes);
  std::fill(std::begin(full.strides), std::end(full.strides), 0);
  give(given, full);
}

void* take_output(const ncclEpDispatchOutputs_t& given, const Output& output) {
  const std::string name = concat("output ", output.name);
  const Tensor tensor = take_tensor(given.*output.field, name.c_str());
  if (output.sizes.ndim == 0) {
    EP_CHECK(!tensor, name, " is given, but this call has none");
    return nullptr;
  }
  check_tensor(tensor, name.c_str(), output.dtype, output.sizes);
  return tensor.data;
}

void set_inputs(LlDispatchParams& p, const ncclEpHandle& handle, const Inputs& inputs) {
  EP_CHECK_USAGE(handle.routed_tokens >= 0, "the handle has no routing yet: ncclEpUpdateHandle gives it");
  const Tensor& x = inputs.tokens;
  EP_CHECK(x.sizes.at[0] == handle.routed_tokens, "tokens have shape ", text_of(x.sizes), ", topk_idx has ",
           handle.routed_tokens, " tokens");
  check_contiguous(x, "tokens");
  check_data(x, "tokens");
  check_aligned(x, "tokens");
  p.num_tokens = handle.routed_tokens;
  p.x = x.data;
  p.topk_idx = handle.topk_idx;
  if (inputs.weights) {
    check_tensor(inputs.weights, "topk_weights", NCCL_EP_FLOAT32, {p.num_tokens, p.shape.topk});
    p.topk_weights = static_cast<const float*>(inputs.weights.data);
  }
  if (inputs.scales) {
    check_data(inputs.scales, "scales");
    EP_CHECK(p.quant == Quant::kNone, "scales given together with quant ", ep::name_of(p.quant));
    p.scales = {inputs.scales.data, inputs.scales.strides[0], inputs.scales.strides[1], p.out_scales.count,
                p.out_scales.element_bytes};
  }
  p.handle = handle.pointers(p.num_tokens);
}

void set_outputs(LlDispatchParams& p, const Inputs& inputs, const ncclEpDispatchOutputs_t& given) {
  const Outputs outputs = outputs_of(p, inputs);
  p.out_x = take_output(given, outputs[kTokens]);
  p.out_scales.data = take_output(given, outputs[kScales]);
  p.out_weights = static_cast<float*>(take_output(given, outputs[kWeights]));
  p.out_topk_idx = take_output(given, outputs[kIdx]);
  p.row_expert = static_cast<int32_t*>(take_output(given, outputs[kRowExpert]));
  p.info = static_cast<int32_t*>(take_output(given, outputs[kInfo]));
  EP_CHECK(reinterpret_cast<uintptr_t>(p.out_x) % 16 == 0, "output tokens at address ", p.out_x,
           " are not aligned to 16 bytes");
}

}  // namespace
}  // namespace ep::c

using namespace ep;
using namespace ep::c;

extern "C" {

ncclEpResult_t ncclEpDispatchShapes(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                                    const ncclEpDispatchConfig_t* config, const ncclEpDispatchOutputs_t* outputs) {
  return guarded("ncclEpDispatchShapes", [&] {
    const Inputs taken = take_inputs(inputs);
    const LlDispatchParams p = make_params(object_of(handle), taken, take_or_default(config, "config"));
    const ncclEpDispatchOutputs_t given = take(outputs, "outputs");
    const Outputs all = outputs_of(p, taken);
    for (const Output& output : all) take_tensor(given.*output.field, output.name);  // refuse all or fill all
    for (const Output& output : all) fill(given.*output.field, output);
  });
}

ncclEpResult_t ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t* inputs,
                              const ncclEpDispatchOutputs_t* outputs, const ncclEpDispatchConfig_t* config,
                              void* stream) {
  return guarded("ncclEpDispatch", [&] {
    ncclEpHandle& object = object_of(handle);
    Group& group = object.state->get();
    object.require_nothing_pending();
    const Inputs taken = take_inputs(inputs);
    LlDispatchParams p = make_params(object, taken, take_or_default(config, "config"));
    set_inputs(p, object, taken);
    set_outputs(p, taken, take(outputs, "outputs"));
    const ScopedDevice device(object.device());
    group.dispatch(p, stream);
    object.dispatched_tokens = p.num_tokens;
    if (p.half == Half::kSend) {
      object.dispatch = p;
      object.pending = Pending::kDispatch;
    } else if (object.device() < 0) {
      object.state->check_overflow();
    }
  });
}

}  // extern "C"
