// Handles without options, as NCCL EP has them: what its callers must give, and counts and ids in their form.
#include <algorithm>
#include <utility>

#include "api/c_device.h"
#include "api/c_dispatch.h"
#include "api/factory.h"

namespace ep::c {
namespace {

void require(const ncclEpTensor_t* given, const char* name, const char* where) {
  EP_CHECK(given != nullptr, name, " is not given, which ", where, " needs");
}
void forbid(const ncclEpTensor_t* given, const char* name, const char* where) {
  EP_CHECK(given == nullptr, name, " is given, which ", where, " has not got");
}

Integers take_counter(const ncclEpTensor_t* given, const char* name, int64_t count, bool may_be_64) {
  const Tensor tensor = take_tensor(given, name);
  if (!tensor) return {};
  EP_CHECK(tensor.dtype == ncclInt32 || (may_be_64 && tensor.dtype == ncclInt64), name, " is ", name_of(tensor.dtype),
           ", must be int32", may_be_64 ? " or int64" : "");
  check_tensor(tensor, name, tensor.dtype, {count}, true);
  return {tensor.data, tensor.dtype == ncclInt64};
}

// Tensors of the same rows have some or none.
void check_emptiness(const ncclEpTensor_t* rows, const ncclEpTensor_t* others, const char* name) {
  const Tensor first = take_tensor(rows, "tokens"), second = take_tensor(others, name);
  EP_CHECK((first.sizes.count() == 0) == (second.sizes.count() == 0), name, " has shape ", text_of(second.sizes),
           ", tokens have ", text_of(first.sizes), ": one of them is empty");
}

// Rows and scales that are forwarded lie at multiples of 16 bytes, in windows too.
void check_forwarded(const DispatchCall& call, const ncclEpDispatchInputs_t& inputs,
                     const ncclEpDispatchOutputs_t& outputs) {
  constexpr int kStep = 16;
  const std::pair<const ncclEpTensor_t*, const char*> tensors[] = {{inputs.tokens, "tokens"},
                                                                   {inputs.scales, "scales"},
                                                                   {outputs.tokens, "output tokens"},
                                                                   {outputs.scales, "output scales"}};
  for (const auto& [given, name] : tensors) {
    const Tensor tensor = take_tensor(given, name);
    if (!tensor) continue;
    check_aligned(tensor, name);
    EP_CHECK(given->win_hdl == nullptr || given->win_offset % kStep == 0, name, " has win_offset ", given->win_offset,
             ", must be a multiple of ", kStep);
  }
  const Sizes rows = take_tensor(outputs.tokens, "output tokens").sizes;
  const Sizes out = take_tensor(outputs.scales, "output scales").sizes;
  EP_CHECK(rows.at[0] == out.at[0], "output scales has shape ", text_of(out), ", output tokens ", text_of(rows),
           ": they must have the same rows");
  const int64_t scales = call.scales.sizes.at[1] * element_bytes(call.scales.dtype);
  EP_CHECK(scales % kStep == 0, "scales have rows of ", scales, " bytes, must be a multiple of ", kStep);
}

bool has_window(const ncclEpTensor_t* given) { return given != nullptr && given->win_hdl != nullptr; }

// Windows are not needed here, but who asks for them by zero_copy must have them.
void check_windows(const ncclEpHandle& handle, const ncclEpDispatchOutputs_t& outputs, bool forwards_scales) {
  const bool tokens = has_window(outputs.tokens), scales = has_window(outputs.scales);
  EP_CHECK(!handle.is_ht || !forwards_scales || tokens == scales,
           "output tokens and output scales must both have a window, or none of them");
  if (!handle.state->config.needs_windows) return;
  if (handle.is_ht) {
    EP_CHECK(tokens, "output tokens have no window, but zero_copy is NCCL_EP_ZERO_COPY_ON");
    return;
  }
  EP_CHECK(
      !has_expert_rows(handle.output.layout) && (tokens || (forwards_scales && scales)),
      "zero_copy is NCCL_EP_ZERO_COPY_ON, which in low latency needs layout RANK_MAJOR and a window of the output");
}

}  // namespace

void check_plain_combine(const ncclEpHandle& handle, const ncclEpCombineInputs_t& inputs, bool is_backward) {
  require(inputs.tokens, "tokens", "a combine");
  const DataType dtype = take_tensor(inputs.tokens, "tokens").dtype;
  EP_CHECK(dtype == ncclBfloat16 || dtype == ncclFloat16 || dtype == ncclFloat32, "tokens are ", name_or_number(dtype),
           ", must be bfloat16, float16 or float32");
  if (!handle.is_ht) return;
  EP_CHECK(!handle.state->config.needs_windows || has_window(inputs.tokens),
           "tokens have no window, but zero_copy is NCCL_EP_ZERO_COPY_ON");
  if (is_backward) check_emptiness(inputs.tokens, inputs.topk_weights, "topk_weights");
}

void check_plain(const DispatchCall& call, const ncclEpHandle& handle, const ncclEpDispatchInputs_t& inputs,
                 const ncclEpDispatchOutputs_t& outputs) {
  EP_CHECK(call.tokens, "tokens are not given");
  require(outputs.tokens, "output tokens", "a dispatch");
  if (handle.is_ht) {
    const Sizes rows = take_tensor(outputs.tokens, "output tokens").sizes;
    const int64_t most = handle.state->config.max_recv;
    EP_CHECK(rows.at[0] >= most, "output tokens has shape ", text_of(rows),
             ", must have at least max_recv_tokens_per_rank, ", most, ", rows");
  }
  check_windows(handle, outputs, static_cast<bool>(call.scales));
  if (call.scales) check_forwarded(call, inputs, outputs);
  const bool expert_rows = has_expert_rows(handle.output.layout);
  if (!handle.is_ht) {
    if (expert_rows) return;
    require(inputs.topk_weights, "topk_weights", "layout RANK_MAJOR");
    require(outputs.topk_weights, "output topk_weights", "layout RANK_MAJOR");
    require(outputs.topk_idx, "output topk_idx", "layout RANK_MAJOR");
    return;
  }
  if (call.is_backward) {
    forbid(inputs.topk_weights, "topk_weights", "a backward pass");
    forbid(outputs.topk_weights, "output topk_weights", "a backward pass");
    forbid(outputs.topk_idx, "output topk_idx", "a backward pass");
    return;
  }
  require(inputs.topk_weights, "topk_weights", "a forward pass");
  require(outputs.topk_weights, "output topk_weights", "a forward pass");
  check_emptiness(outputs.tokens, outputs.topk_weights, "output topk_weights");
  if (expert_rows) {
    forbid(outputs.topk_idx, "output topk_idx", "layout EXPERT_MAJOR");
  } else {
    require(outputs.topk_idx, "output topk_idx", "layout FLAT");
  }
}

LayoutInfoParams take_counters(const ncclEpHandle& handle, const ncclEpLayoutInfo_t& given) {
  const int experts = handle.output.local_experts, ranks = handle.output.num_ranks;
  const bool expert_rows = has_expert_rows(handle.output.layout);
  LayoutInfoParams params;
  if (handle.is_ht) {
    forbid(given.src_rank_counters, "src_rank_counters", "high throughput");
    params.counters = take_counter(given.expert_counters, "expert_counters", experts, expert_rows);
    if (!expert_rows) forbid(given.expert_offsets, "expert_offsets", "layout FLAT");
    params.offsets = take_counter(given.expert_offsets, "expert_offsets", experts, true);
    params.total = take_counter(given.recv_total_counter, "recv_total_counter", 1, true);
    return params;
  }
  forbid(given.expert_offsets, "expert_offsets", "low latency");
  forbid(given.recv_total_counter, "recv_total_counter", "low latency");
  if (expert_rows) {
    require(given.expert_counters, "expert_counters", "layout EXPERT_MAJOR");
    forbid(given.src_rank_counters, "src_rank_counters", "layout EXPERT_MAJOR");
    params.counters = take_counter(given.expert_counters, "expert_counters", experts, false);
  } else {
    forbid(given.expert_counters, "expert_counters", "layout RANK_MAJOR");
    params.counters = take_counter(given.src_rank_counters, "src_rank_counters", ranks, false);
  }
  params.counts = handle.scratch.info;
  params.num_counts = handle.output.bins();
  return params;
}

void take_ids(const ncclEpHandle& handle, const ncclEpLayoutInfo_t& given, Output& target, LayoutInfoParams& params) {
  const uint32_t kind = choice_of(given.recv_topk_idx_kind, NCCL_EP_EXPERT_ID_GLOBAL, "recv_topk_idx_kind");
  const Tensor tensor = take_tensor(target.given, "output topk_idx");
  if (!tensor) return;
  check_id_type(tensor, "output topk_idx");
  check_tensor(tensor, "output topk_idx", tensor.dtype, target.sizes, target.is_least);
  const bool is_64 = tensor.dtype == ncclInt64;
  const bool converts = !handle.is_ht && is_64 != handle.is_idx64;  // low latency has the type of the ids given
  if (converts) {
    target.given = nullptr;
  } else {
    target.dtype = tensor.dtype;
  }
  if (!converts && kind != NCCL_EP_EXPERT_ID_GLOBAL) return;
  params.ids = converts ? Integers{target.scratch, handle.is_idx64} : Integers{tensor.data, is_64};
  params.out_ids = {tensor.data, is_64};
  params.num_ids = target.sizes.count();
  if (kind == NCCL_EP_EXPERT_ID_GLOBAL) params.first_expert = handle.state->get().rank() * handle.output.local_experts;
}

void adopt_memory(ncclEpHandle& handle, int64_t num_tokens, int64_t num_rows) {
  if (!handle.is_ht || handle.owns_memory || handle.given_tokens >= 0) return;
  EP_CHECK(num_tokens <= handle.shape.max_tokens, num_tokens, " tokens, but max_dispatch_tokens_per_rank is ",
           handle.shape.max_tokens);
  handle.given_tokens = static_cast<int>(num_tokens);
  handle.is_routed = true;
  if (handle.is_eager()) handle.output.capacity = std::min(num_rows, handle.scratch.rows);
}

void route_plain(ncclEpHandle& handle, LayoutInfoParams counters, void* stream) {
  OverlapCheck check;
  check.reads("topk_idx", handle.ids_extent());
  check.writes("handle_mem", handle.memory_extent());
  route(handle, handle.scratch.info, stream);
  const OutputShape& output = handle.output;
  const HtHandlePtrs pointers = handle.ht_pointers(handle.given_tokens);
  counters.counts = pointers.expert_counts;
  counters.num_counts = output.local_experts;
  if (has_expert_rows(output.layout)) {
    counters.alignment = output.alignment;
    if (!handle.is_eager()) counters.limit = handle.state->config.max_recv;
  } else {
    counters.rows = handle.scratch.info + output.demand_at();
    counters.num_rows = output.bins();
  }
  write_info(handle, counters, stream);
  if (handle.device() < 0) handle.state->check_overflow();
}

void write_info(const ncclEpHandle& handle, const LayoutInfoParams& params, void* stream) {
  if (!params.has_work()) return;
  const ScopedDevice device(handle.device());
  write_layout_info(params, handle.device() >= 0, stream);
}

}  // namespace ep::c
