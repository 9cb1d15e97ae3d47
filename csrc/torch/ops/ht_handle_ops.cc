// The ops of high throughput that take a handle: cached dispatch and combine.
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "torch/ops/fast_call.h"
#include "torch/ops/ht_payload.h"
#include "torch/ops/ops.h"

namespace ep {
namespace {

using at::Tensor;

HtHandlePtrs resolve_handle(const HandleInfo& info, const Group& group, const Tensor& route, const Tensor& slots,
                            const at::Device& device) {
  const OutputShape& output = info.output;
  const int64_t num_slots = slots.dim() == 2 ? slots.size(0) : 0;
  EP_CHECK(num_slots <= static_cast<int64_t>(output.num_ranks) * output.max_tokens, "a handle of ", num_slots,
           " received rows, at most ", static_cast<int64_t>(output.num_ranks) * output.max_tokens);
  const HtHandleShape sizes = ht_handle_shape(output, group, info.num_tokens, num_slots);
  check_tensor(route, "the handle's route", at::kInt, {sizes.route_size()}, device);
  check_tensor(slots, "the handle's slots", at::kInt, {sizes.num_slots, sizes.slot_words()}, device);
  return HtHandlePtrs::of(route.data_ptr<int32_t>(), slots.data_ptr<int32_t>(), sizes);
}

// ---- Cached dispatch

#define EP_HT_CACHED_ARGS                                                                                          \
  at::TensorList xs, const OptionalTensor &x_scales, const Tensor &route, const Tensor &slots, int64_t num_tokens, \
      int64_t capacity, at::IntArrayRef config
#define EP_HT_CACHED_PASS xs, x_scales, route, slots, num_tokens, capacity, config

// Returns what was not given.
PayloadOutputs run_ht_cached(const at::Tensor& seq, at::TensorList xs, const OptionalTensor& x_scales,
                             const Tensor& route, const Tensor& slots, int64_t num_tokens, int64_t capacity,
                             at::IntArrayRef numbers, const PayloadRefs* given) {
  const auto [registered, group, device, on_device] = OnGroup(seq);
  const Beside::Turn turn = registered->beside.take();
  const DispatchConfig config = dispatch_config(numbers);
  const auto info = HandleInfo::of(group.num_ranks(), num_tokens, capacity, config);
  const HtPayload payload{xs, x_scales};
  HtDispatchParams p;
  p.variant = HtVariant::kCached;
  p.output = info.output;
  p.shape = info.shape();
  p.handle = resolve_handle(info, group, route, slots, device);
  EP_CHECK(!xs.empty() && xs[0].dim() == 2 && xs[0].size(0) == num_tokens, "x has shape ",
           xs.empty() ? at::IntArrayRef() : xs[0].sizes(), ", must be [", num_tokens,
           ", hidden], as in the dispatch of the handle");
  InputTypes row = check_rows(xs[0], row_scales_of(x_scales, config.quant), device);
  row.topk = config.topk;
  check_payload(payload, num_tokens, device);
  p.options = config;
  set_parts(p, payload);
  p.num_tokens = to_int(num_tokens, "number of tokens");
  p.arrivals = registered->take_arrivals();
  if (p.arrivals.state != nullptr) p.arrivals.check(p.output);
  group.prepare(p);
  const OutputTypes types = output_types(row, p.options.quant, p.output);
  if (given != nullptr) {
    AliasCheck aliases;
    aliases.reads("the handle's route", route);
    aliases.reads("the handle's slots", slots);
    check_payload_outputs(*given, payload, p.output, types, device, aliases);
  }
  PayloadOutputs made;
  if (given == nullptr) made = allocate_payload(*registered, payload, p.output, types, device);
  set_payload_outputs(p, given != nullptr ? *given : PayloadRefs::of(made));
  void* stream = registered->order.next_stream(device);
  group.run(p, stream);
  registered->order.note_enqueued(device, stream);
  turn.note_end();
  return made;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> ht_dispatch_cached(const Tensor& seq, EP_HT_CACHED_ARGS) {
  return guarded([&] {
    PayloadOutputs moved = run_ht_cached(seq, EP_HT_CACHED_PASS, nullptr);
    auto [x1, x2, x3] = extra(moved, route.device());
    return std::make_tuple(std::move(moved.xs[0]), std::move(moved.scales), std::move(x1), std::move(x2),
                           std::move(x3));
  });
}

void ht_dispatch_cached_out(const Tensor& seq, EP_HT_CACHED_ARGS, at::TensorList out_xs, const Tensor& out_scales) {
  guarded([&] {
    const PayloadRefs given{out_xs, out_scales};
    run_ht_cached(seq, EP_HT_CACHED_PASS, &given);
  });
}

// ---- combine

#define EP_HT_COMBINE_ARGS                                                                                      \
  const OptionalTensor &rows, const OptionalTensor &values, const Tensor &route, const Tensor &slots,           \
      const OptionalTensor &weights, const OptionalTensor &topk_idx, at::TensorList biases, int64_t num_tokens, \
      int64_t capacity, at::IntArrayRef config
#define EP_HT_COMBINE_PASS rows, values, route, slots, weights, topk_idx, biases, num_tokens, capacity, config

// Returns what was not given: rows and scalars.
std::pair<Tensor, Tensor> run_ht_combine(const at::Tensor& seq, const OptionalTensor& rows,
                                         const OptionalTensor& values, const Tensor& route, const Tensor& slots,
                                         const OptionalTensor& weights, const OptionalTensor& topk_idx,
                                         at::TensorList biases, int64_t num_tokens, int64_t capacity,
                                         at::IntArrayRef numbers, const Tensor* given,
                                         const Tensor* row_signals = nullptr) {
  const auto [registered, group, device, on_device] = OnGroup(seq);
  const Beside::Turn turn = registered->beside.take();
  const CombineConfig config = combine_config(numbers);
  const auto info = HandleInfo::of(group.num_ranks(), num_tokens, capacity, config);
  HtCombineParams p;
  set_combine(p, info.output, static_cast<int>(info.num_experts), to_int(num_tokens, "number of tokens"), config);
  p.handle = resolve_handle(info, group, route, slots, device);
  Tensor out, out_values;
  if (rows) {
    const CombineArgs args = combine_args(*rows, weights, topk_idx, biases);
    set_types(p, args);
    const at::ScalarType out_dtype = float_type_of(config.out_dtype);
    EP_CHECK(p.hidden > 0, "rows have no elements");
    check_tensor(*rows, "rows", rows->scalar_type(), row_shape(p.output, args.hidden), device);
    check_aligned(*rows, "rows");
    p.rows = pointer<void>(*rows);
    set_weights(p, args, info, device);
    set_biases(p, args, info, out_dtype, device);
    p.out = take_combined(args, {&route, &slots}, info, out_dtype, device, given, out);
  }
  if (values) {
    check_tensor(*values, "values", at::kFloat, values_shape(p.output), device);
    p.has_values = true;
    p.values = values->data_ptr<float>();
    out_values = new_tensor({num_tokens, info.topk}, at::kFloat, device);
    p.out_values = out_values.data_ptr<float>();
  }
  set_signals(p, row_signals, device);
  if (row_signals != nullptr) registered->order.expect_signals();
  void* stream = registered->order.next_stream(device);
  group.combine(p, stream);
  registered->order.note_enqueued(device, stream);
  turn.note_end();
  return {std::move(out), std::move(out_values)};
}

std::tuple<Tensor, Tensor> ht_combine(const Tensor& seq, EP_HT_COMBINE_ARGS) {
  return guarded([&] {
    auto [out, out_values] = run_ht_combine(seq, EP_HT_COMBINE_PASS, nullptr);
    if (!rows) out = new_tensor({0}, float_type_of(combine_config(config).out_dtype), route.device());
    if (!values && !PackedResultsScope::is_on()) out_values = new_tensor({0}, at::kFloat, route.device());
    return std::make_tuple(std::move(out), std::move(out_values));
  });
}

void ht_combine_out(const Tensor& seq, EP_HT_COMBINE_ARGS, const Tensor& out) {
  guarded([&] { run_ht_combine(seq, EP_HT_COMBINE_PASS, &out); });
}

// As ht_combine, of rows that a kernel still writes.
Tensor ht_combine_signalled(const Tensor& seq, const Tensor& rows, const Tensor& route, const Tensor& slots,
                            const OptionalTensor& weights, const OptionalTensor& topk_idx, at::TensorList biases,
                            int64_t num_tokens, int64_t capacity, at::IntArrayRef config, const Tensor& row_signals) {
  return guarded([&] {
    return run_ht_combine(seq, rows, {}, route, slots, weights, topk_idx, biases, num_tokens, capacity, config, nullptr,
                          &row_signals)
        .first;
  });
}

#define EP_HT_CACHED_SCHEMA \
  "Tensor(a!) seq, Tensor[] xs, Tensor? x_scales, Tensor route, Tensor slots, " EP_HANDLE_SCHEMA
#define EP_HT_COMBINE_SCHEMA                                                                    \
  "Tensor(a!) seq, Tensor? rows, Tensor? values, Tensor route, Tensor slots, Tensor? weights, " \
  "Tensor? topk_idx, Tensor[] biases, " EP_HANDLE_SCHEMA

fast_call::Op ht_handle_ops[] = {EP_OP(ht_dispatch_cached), EP_OP(ht_dispatch_cached_out), EP_OP(ht_combine),
                                 EP_OP(ht_combine_out), EP_OP(ht_combine_signalled)};

}  // namespace
}  // namespace ep

TORCH_LIBRARY_FRAGMENT(nccl_ep, library) {
  library.def("ht_dispatch_cached(" EP_HT_CACHED_SCHEMA
              ") -> (Tensor x, Tensor scales, Tensor x1, Tensor x2, Tensor x3)");
  library.def("ht_dispatch_cached_out(" EP_HT_CACHED_SCHEMA ", Tensor(b!)[] out_xs, Tensor(c!) out_scales) -> ()");
  library.def("ht_combine(" EP_HT_COMBINE_SCHEMA ") -> (Tensor out, Tensor out_values)");
  library.def(
      "ht_combine_signalled(Tensor(a!) seq, Tensor rows, Tensor route, Tensor slots, Tensor? weights, "
      "Tensor? topk_idx, Tensor[] biases, " EP_HANDLE_SCHEMA ", Tensor row_signals) -> Tensor out");
  library.def("ht_combine_out(" EP_HT_COMBINE_SCHEMA ", Tensor(b!) out) -> ()");
}

EP_IMPLEMENT(ht_handle_ops)
