// High throughput's dispatch and routing.
#include <algorithm>
#include <vector>

#include "api/c_device.h"
#include "api/c_dispatch.h"
#include "base/math.h"

namespace ep::c {
namespace {

HtPart part_of(const Tensor& in) {
  return HtPart::of(in.data, in.sizes.at[0], static_cast<int>(in.sizes.at[1]), element_bytes(in.dtype), in.strides[0],
                    in.strides[1]);
}

// What all variant have in common, of `num_tokens` tokens.
HtDispatchParams params_of(const ncclEpHandle& handle, HtVariant variant, int num_tokens) {
  HtDispatchParams p;
  p.variant = variant;
  p.shape = handle.shape;
  p.output = handle.output;
  p.num_tokens = num_tokens;
  p.handle = handle.ht_pointers(num_tokens);
  p.topk_idx = handle.topk_idx;
  p.is_idx64 = handle.is_idx64;
  return p;
}

// The tensors that travel: tokens, their scales, the extra ones.
void set_parts(HtDispatchParams& p, const DispatchCall& call, const OutputPointers& out) {
  p.dtype = call.dtype;
  p.hidden = call.hidden;
  p.options = call.options;
  const auto add = [&](const HtPart& part, void* target) {
    p.parts[p.num_parts] = part;
    p.parts[p.num_parts++].out = target;
  };
  add(part_of(call.tokens), out[kTokens]);
  if (call.options.quant != Quant::kNone) {
    p.add_quant_scales();
    p.parts[1].out = out[kScales];
  } else if (call.scales) {
    add(part_of(call.scales), out[kScales]);
  }
  for (int i = 0; i < NCCL_EPX_MAX_EXTRA; i++) {
    if (call.extra[i]) add(part_of(call.extra[i]), out[kExtra + i]);
  }
}

// A routing moves no row, but every operation has one: the smallest stands for what the dispatches will move.
HtPart smallest_row() {
  HtPart part;
  part.bytes = 16;
  return part;
}

}  // namespace

void dispatch_ht(ncclEpHandle& handle, const DispatchCall& call, const Outputs& outputs, void* stream) {
  const bool is_cached = call.is_cached;
  const HtVariant variant = is_cached          ? HtVariant::kCached
                            : handle.is_routed ? HtVariant::kSend
                                               : HtVariant::kRouteAndSend;
  HtDispatchParams p = params_of(handle, variant, is_cached ? handle.dispatched_tokens : handle.given_tokens);
  p.topk_weights = static_cast<const float*>(call.weights.data);
  const OutputPointers out = take_outputs(outputs);
  set_parts(p, call, out);
  check_apart(call, handle, outputs, out);
  p.info = static_cast<int32_t*>(out[kInfo]);
  p.row_expert = static_cast<int32_t*>(out[kRowExpert]);
  p.out_topk_idx = out[kIdx];
  if (handle.is_plain && outputs[kIdx].sizes.ndim > 0) p.is_idx64 = outputs[kIdx].dtype == ncclInt64;
  p.out_weights = static_cast<float*>(out[kWeights]);
  const ScopedDevice device(handle.device());
  handle.state->get().dispatch(p, stream);
  handle.dispatched_tokens = p.num_tokens;
}

void route(ncclEpHandle& handle, int32_t* info, void* stream) {
  HtDispatchParams p = params_of(handle, HtVariant::kRoute, handle.given_tokens);
  if (handle.is_exact) p.output.capacity = INT32_MAX;
  p.info = info;
  p.parts[p.num_parts++] = smallest_row();
  std::vector<int64_t> sizes(2 + handle.shape.local_experts(), 0);  // rows, slots, the demand of each expert
  if (handle.is_exact) p.host_sizes = sizes.data();
  const ScopedDevice device(handle.device());
  handle.state->get().dispatch(p, stream);
  if (handle.is_exact) handle.output.capacity = sizes[0];
  if (handle.is_eager() && handle.output.layout == OutputLayout::kPacked) {
    int64_t padded = 0;
    for (auto demand = sizes.begin() + 2; demand != sizes.end(); ++demand) {
      padded += align_up<int64_t>(*demand, handle.output.alignment);
    }
    handle.output.capacity = std::max(padded, sizes[0]);
  }
  handle.is_routed = true;
  handle.dispatched_tokens = -1;
}

namespace {

void route_for_caller(ncclEpHandle& handle, const ncclEpTensor_t* info, void* stream) {
  handle.state->get();
  EP_CHECK_USAGE(!handle.is_plain, "the handle has no options: ncclEpUpdateHandle has routed it");
  EP_CHECK_USAGE(handle.is_ht, "the handle is of low latency, whose dispatch carries the routing");
  handle.require_given();
  const Tensor filled = take_tensor(info, "info");
  check_tensor(filled, "info", ncclInt32, {handle.output.info_size()});
  OverlapCheck check;
  check.reads("topk_idx", handle.ids_extent());
  check.writes("handle_mem", handle.memory_extent());
  check.writes("info", extent_of(filled));
  route(handle, static_cast<int32_t*>(filled.data), stream);
  if (handle.device() < 0) handle.state->check_overflow();
}

}  // namespace
}  // namespace ep::c

using namespace ep::c;

extern "C" ncclResult_t ncclEpxRouteHandle(ncclEpHandle_t handle, const ncclEpTensor_t* info, cudaStream_t stream) {
  return guarded("ncclEpxRouteHandle", [&] { route_for_caller(object_of(handle), info, stream); });
}
