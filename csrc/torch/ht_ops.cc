// The ops of high throughput. A dispatch of exact sizes (capacity -1) asks the other ranks how much will come before it
// makes its outputs; every other knows their sizes. Outputs lie in the window's arena while there is room.
#include "torch/ht_ops.h"

#include <tuple>
#include <vector>

#include "torch/device.h"
#include "torch/direct.h"
#include "torch/ops.h"
#include "torch/registry.h"

namespace ep {
namespace {

using at::Tensor;

constexpr int64_t kExact = -1;  // capacity
// x and further tensors. Each has a result of its own, empty where there is none: an op that changes an argument may
// not return a list (functionalization takes it for an alias).
constexpr int kMaxTensors = 4;

// A tensor that other ranks may write to or read; an ordinary one where there is no room for it.
Tensor arena_tensor(Registered& registered, at::IntArrayRef sizes, at::ScalarType type, const at::Device& device) {
  int64_t elements = 1;
  for (int64_t size : sizes) {
    EP_CHECK(size >= 0, "a dimension of ", size);
    EP_CHECK(!__builtin_mul_overflow(elements, size, &elements) && elements <= INT64_MAX / 16, "a tensor of ", sizes,
             ": beyond 64 bits");
  }
  if (elements > 0 && device.is_cuda() && registered.pool() != nullptr) return registered.pool()->empty(sizes, type);
  if (elements == 0 || !device.is_cpu()) return new_tensor(sizes, type, device);
  std::shared_ptr<void> block = Arena::take(registered.group->arena(), elements * at::elementSize(type));
  if (block == nullptr) return new_tensor(sizes, type, device);
  void* data = block.get();
  return at::from_blob(
      data, sizes, [block = std::move(block)](void*) mutable { block.reset(); },
      at::TensorOptions(type).device(device));
}

template <class T>
T* pointer(const Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<T*>(tensor.data_ptr());
}

// ---- The payload of a dispatch: tensors [T, n], the first with scales or quantised

struct Payload {
  at::TensorList xs;
  const OptionalTensor& scales;
};

void check_payload(const Payload& payload, int64_t num_tokens, const at::Device& device) {
  EP_CHECK(!payload.xs.empty() && payload.xs.size() <= kMaxTensors, payload.xs.size(), " tensors, must be 1 to ",
           kMaxTensors);
  for (size_t i = 1; i < payload.xs.size(); i++) {
    const Tensor& x = payload.xs[i];
    EP_CHECK(x.dim() == 2 && x.size(0) == num_tokens, "tensor ", i, " of the dispatch has ", x.dim(),
             " dimensions, the first of them ", x.dim() == 0 ? 0 : x.size(0), ": must be [", num_tokens, ", elements]");
    check_tensor(x, "a further tensor", x.scalar_type(), x.sizes(), device);
    check_aligned(x, "a further tensor");
    const int64_t bytes = x.size(1) * x.element_size();
    EP_CHECK(bytes > 0 && bytes % 16 == 0, "rows of tensor ", i, " have ", bytes, " bytes: must be a multiple of 16");
  }
}

HtPart part_of(const Tensor& x) {
  const int bytes = to_int(x.size(1) * x.element_size(), "bytes of a row");
  if (x.is_contiguous()) return HtPart::contiguous(x.data_ptr(), bytes);
  return HtPart::strided(x.data_ptr(), bytes, static_cast<int>(x.element_size()), x.stride(0), x.stride(1));
}

// Sizes and input pointers of all parts: x, its scales, the further tensors.
void set_parts(HtDispatchParams& p, const Payload& payload) {
  const auto add = [&](const Tensor& x) { p.parts[p.num_parts++] = part_of(x); };
  add(payload.xs[0]);
  p.dtype = dtype_of(payload.xs[0].scalar_type());
  p.hidden = to_int(payload.xs[0].size(1), "hidden");
  if (p.quant != Quant::kNone) {
    EP_CHECK(!payload.scales, "scales given together with quant ", name_of(p.quant));
    p.add_quant_scales();
  } else if (payload.scales) {
    add(*payload.scales);
  }
  for (const Tensor& x : payload.xs.slice(1)) add(x);
}

struct Moved {
  std::vector<Tensor> xs;
  Tensor scales;
};
struct MovedRefs {  // as DispatchRefs
  at::TensorList xs;
  const Tensor& scales;

  static MovedRefs of(const Moved& moved) { return {moved.xs, moved.scales}; }
};

Moved allocate_moved(Registered& registered, const Payload& payload, const OutputShape& output,
                     const OutputTypes& types, const at::Device& device) {
  Moved moved;
  moved.xs.reserve(payload.xs.size());
  moved.xs.push_back(arena_tensor(registered, types.x, types.x_type, device));
  const bool has_scales = types.scales.size() > 1;
  if (has_scales || !TogetherScope::is_on()) {
    moved.scales = arena_tensor(registered, types.scales, types.scales_type, device);
  }
  for (const Tensor& x : payload.xs.slice(1)) {
    moved.xs.push_back(arena_tensor(registered, row_shape(output, x.size(1)), x.scalar_type(), device));
  }
  return moved;
}

void check_moved(const MovedRefs& moved, const Payload& payload, const OutputShape& output, const OutputTypes& types,
                 const at::Device& device, Apart& apart) {
  EP_CHECK(moved.xs.size() == payload.xs.size(), moved.xs.size(), " output tensors for ", payload.xs.size());
  const auto check = [&](const Tensor& out, at::ScalarType type, at::IntArrayRef sizes) {
    check_tensor(out, "out_x", type, sizes, device);
    check_aligned(out, "out_x");
  };
  check(moved.xs[0], types.x_type, types.x);
  for (size_t i = 1; i < moved.xs.size(); i++) {
    check(moved.xs[i], payload.xs[i].scalar_type(), row_shape(output, payload.xs[i].size(1)));
  }
  check_tensor(moved.scales, "out_scales", types.scales_type, types.scales, device);
  for (const Tensor& x : payload.xs) apart.reads("x", x);
  apart.reads("scales", pointer_to(payload.scales));
  for (const Tensor& out : moved.xs) apart.writes("out_x", out);
  apart.writes("out_scales", moved.scales);
}

void set_moved(HtDispatchParams& p, const MovedRefs& moved) {
  const bool has_scales = p.num_parts > static_cast<int>(moved.xs.size());
  int part = 0;
  p.parts[part++].out = pointer<void>(moved.xs[0]);
  if (has_scales) p.parts[part++].out = pointer<void>(moved.scales);
  for (size_t i = 1; i < moved.xs.size(); i++) p.parts[part++].out = pointer<void>(moved.xs[i]);
}

// ---- dispatch

struct HtTensors {
  Moved moved;
  Tensor weights, topk_idx, row_expert, info, route, slots;
  // Where sizes are exact:
  int64_t most_tokens = 0;      // of any rank
  std::vector<int64_t> demand;  // of each local expert
};

HtHandleShape ht_handle_shape(const OutputShape& output, const Group& group, int64_t num_tokens, int64_t num_slots) {
  return HtHandleShape::make(output, group.topology(), to_int(num_tokens, "number of tokens"), num_slots);
}

struct HtRefs {  // as DispatchRefs
  MovedRefs moved;
  const Tensor &weights, &topk_idx, &row_expert, &info, &route, &slots;

  static HtRefs of(const HtTensors& t) {
    return {MovedRefs::of(t.moved), t.weights, t.topk_idx, t.row_expert, t.info, t.route, t.slots};
  }
};

// What the first half of a dispatch of exact sizes tells the host.
struct HostSizes {
  int64_t rows = 0, slots = 0, most_tokens = 0;
  std::vector<int64_t> demand;
};

HostSizes ask_for_sizes(Group& group, HtDispatchParams p, void* stream) {
  std::vector<int64_t> words(2 + p.shape.local_experts(), 0);
  HostSizes sizes;
  p.steps = HtSteps::kRoute;
  p.host_sizes = words.data();
  p.host_most_tokens = &sizes.most_tokens;
  group.dispatch(p, stream);
  sizes.rows = words[0];
  sizes.slots = words[1];
  sizes.demand.assign(words.begin() + 2, words.end());
  return sizes;
}

// Of exact sizes the info and the route are there already. What the layout has not got: as in allocate_dispatched().
void allocate_received(HtTensors& t, const OutputTypes& types, const OutputShape& output, const HtHandleShape& handle,
                       const at::Device& device) {
  const bool is_exact = t.info.defined();
  const int64_t route_size = handle.route_size(), slots_size[] = {handle.num_slots, handle.slot_words()};
  c10::SmallVector<NewTensor, 6> wanted;
  const auto add = [&](bool is_there, NewTensor tensor) {
    if (is_there || !TogetherScope::is_on()) wanted.push_back(tensor);
  };
  wanted.push_back({&t.weights, types.weights, at::kFloat});
  wanted.push_back({&t.slots, slots_size, at::kInt});
  if (!is_exact) {
    wanted.push_back({&t.info, types.info, at::kInt});
    wanted.push_back({&t.route, route_size, at::kInt});
  }
  add(!has_expert_rows(output.layout), {&t.topk_idx, types.topk_idx, types.idx_type});
  add(output.layout == OutputLayout::kPacked, {&t.row_expert, types.row_expert, at::kInt});
  new_tensors({wanted.data(), wanted.size()}, device);
  clear_handle(t.slots);
  if (!is_exact) clear_handle(t.route);
}

void check_received(const HtRefs& t, const OutputTypes& types, const HtHandleShape& handle, const at::Device& device,
                    Apart& apart) {
  check_tensor(t.weights, "out_weights", at::kFloat, types.weights, device);
  check_tensor(t.topk_idx, "out_topk_idx", types.idx_type, types.topk_idx, device);
  check_tensor(t.row_expert, "out_row_expert", at::kInt, types.row_expert, device);
  check_tensor(t.info, "out_info", at::kInt, types.info, device);
  check_tensor(t.route, "route", at::kInt, {handle.route_size()}, device);
  check_tensor(t.slots, "slots", at::kInt, {handle.num_slots, handle.slot_words()}, device);
  apart.writes("out_weights", t.weights);
  apart.writes("out_topk_idx", t.topk_idx);
  apart.writes("out_row_expert", t.row_expert);
  apart.writes("out_info", t.info);
  apart.writes("route", t.route);
  apart.writes("slots", t.slots);
}

// Returns what was not given. `asks_first`: of exact sizes, if a rank has more than max_tokens, nothing is sent, on all
// ranks alike.
HtTensors run_ht_dispatch(std::string_view buffer, const Payload& payload, const Tensor& topk_idx,
                          const OptionalTensor& topk_weights, DispatchSpec spec, const HtRefs* given,
                          bool asks_first = false) {
  const auto registered = find_group(buffer);
  Group& group = *registered->group;
  const at::Device device = device_of(group);
  const c10::DeviceGuard on_device(device);
  EP_CHECK(!payload.xs.empty(), "no tensor to dispatch");
  const RowSpec row = check_inputs(payload.xs[0], payload.scales, topk_idx, topk_weights, device);
  check_payload(payload, row.num_tokens, device);
  const bool is_exact = spec.capacity == kExact;
  EP_CHECK(!is_exact || spec.layout != static_cast<int64_t>(OutputLayout::kExpertMajor),
           "expert_major needs a capacity: its rows have no exact number");
  EP_CHECK(!is_exact || given == nullptr, "outputs of exact sizes cannot be given");
  const auto output_of = [&](int64_t capacity) {
    return output_shape(group.num_ranks(), spec.num_experts, spec.max_tokens, row.topk, spec.layout, capacity,
                        spec.alignment);
  };
  HtDispatchParams p;
  p.output = output_of(is_exact ? INT32_MAX : spec.capacity);
  p.shape = {group.num_ranks(), to_int(spec.num_experts, "num_experts"), p.output.topk, p.output.max_tokens};
  p.quant = quant_of(spec.quant);
  set_parts(p, payload);
  p.topk_idx = topk_idx.data_ptr();
  p.is_idx64 = row.is_idx64;
  p.topk_weights = topk_weights ? topk_weights->data_ptr<float>() : nullptr;
  p.num_tokens = to_int(row.num_tokens, "number of tokens");
  p.zero_padding = spec.zero_padding;
  p.num_sms = num_sms_of(spec.num_sms);
  if (asks_first && is_exact) p.steps = HtSteps::kRoute;
  group.prepare(p);  // refuses what does not fit before memory is taken for it
  int64_t num_slots = static_cast<int64_t>(group.num_ranks()) * spec.max_tokens;

  HtTensors t;
  void* stream = registered->order.next_stream(device);
  if (is_exact) {
    t.info = new_tensor({p.output.info_size()}, at::kInt, device);
    t.route = new_handle({ht_handle_shape(p.output, group, row.num_tokens, 0).route_size()}, device);
    p.info = t.info.data_ptr<int32_t>();
    p.handle =
        HtHandlePtrs::of(t.route.data_ptr<int32_t>(), nullptr, ht_handle_shape(p.output, group, row.num_tokens, 0));
    const HostSizes sizes = ask_for_sizes(group, p, stream);
    p.steps = HtSteps::kSend;
    p.output = output_of(p.output.layout == OutputLayout::kRankMajor ? spec.max_tokens : sizes.rows);
    num_slots = sizes.slots;
    t.most_tokens = sizes.most_tokens;
    t.demand = sizes.demand;
    if (t.most_tokens > spec.max_tokens) return t;  // asks_first: else it was refused
  }
  const OutputTypes types = output_types(row, spec, p.output);
  const HtHandleShape handle = ht_handle_shape(p.output, group, row.num_tokens, num_slots);
  if (given != nullptr) {
    Apart apart;
    apart.reads("topk_idx", topk_idx);
    apart.reads("topk_weights", pointer_to(topk_weights));
    check_moved(given->moved, payload, p.output, types, device, apart);
    check_received(*given, types, handle, device, apart);
  } else {
    t.moved = allocate_moved(*registered, payload, p.output, types, device);
    allocate_received(t, types, p.output, handle, device);
  }
  const HtRefs out = given != nullptr ? *given : HtRefs::of(t);
  set_moved(p, out.moved);
  p.handle = HtHandlePtrs::of(out.route.data_ptr<int32_t>(), out.slots.data_ptr<int32_t>(), handle);
  p.info = out.info.data_ptr<int32_t>();
  p.row_expert = pointer<int32_t>(out.row_expert);
  p.out_topk_idx = pointer<void>(out.topk_idx);
  p.out_weights = pointer<float>(out.weights);
  group.dispatch(p, stream);
  registered->order.note_enqueued(device, stream);
  return t;
}

using HtDispatchResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// What was dispatched along with x, and empty tensors; none to who takes results together.
std::array<Tensor, kMaxTensors - 1> further(Moved& moved, const at::Device& device) {
  std::array<Tensor, kMaxTensors - 1> results;
  std::move(moved.xs.begin() + 1, moved.xs.end(), results.begin());
  if (TogetherScope::is_on()) return results;
  const int64_t none = 0;
  const NewTensor wanted[] = {
      {&results[0], none, at::kByte}, {&results[1], none, at::kByte}, {&results[2], none, at::kByte}};
  new_tensors(std::span(wanted).subspan(moved.xs.size() - 1), device);
  return results;
}

HtDispatchResult ht_dispatch(std::string_view buffer, const Tensor&, at::TensorList xs, const OptionalTensor& x_scales,
                             const Tensor& topk_idx, const OptionalTensor& topk_weights, EP_DISPATCH_CONFIG) {
  return guarded([&] {
    auto t = run_ht_dispatch(buffer, {xs, x_scales}, topk_idx, topk_weights, EP_DISPATCH_SPEC, nullptr);
    auto [x1, x2, x3] = further(t.moved, t.info.device());
    return HtDispatchResult{std::move(t.moved.xs[0]),
                            std::move(t.moved.scales),
                            std::move(t.weights),
                            std::move(t.topk_idx),
                            std::move(t.row_expert),
                            std::move(t.info),
                            std::move(t.route),
                            std::move(t.slots),
                            std::move(x1),
                            std::move(x2),
                            std::move(x3)};
  });
}

void ht_dispatch_out(std::string_view buffer, const Tensor&, at::TensorList xs, const OptionalTensor& x_scales,
                     const Tensor& topk_idx, const OptionalTensor& topk_weights, EP_DISPATCH_CONFIG,
                     at::TensorList out_xs, const Tensor& out_scales, const Tensor& out_weights,
                     const Tensor& out_topk_idx, const Tensor& out_row_expert, const Tensor& out_info,
                     const Tensor& out_route, const Tensor& out_slots) {
  guarded([&] {
    const HtRefs given{{out_xs, out_scales}, out_weights, out_topk_idx, out_row_expert, out_info, out_route, out_slots};
    run_ht_dispatch(buffer, {xs, x_scales}, topk_idx, topk_weights, EP_DISPATCH_SPEC, &given);
  });
}

// ---- With a handle

void check_entries(const HtHandlePtrs& handle, const HtHandleShape& sizes, const HandleSpec& spec,
                   const OutputShape& output, int rank) {
  check_handle_values(handle.counts, sizes.counts_size(), 0, output.max_tokens, "number of rows");
  const int64_t received = [&] {
    int64_t sum = 0;
    for (int r = 0; r < output.num_ranks; r++) sum += handle.counts[r * output.num_ranks + rank];
    return sum;
  }();
  // Rank layouts need no slots to find a row: a capacity below what came has dropped those of the rows that it dropped.
  EP_CHECK(received <= sizes.num_slots || !sizes.has_expert_rows,
           "the handle is not of these sizes, or was changed: ", received, " rows in slots for ", sizes.num_slots);
  const auto check_routes = [&](const HtRoutes& all, int64_t first, int64_t count) {
    check_handle_values(all.ids + first, count, -1, spec.num_experts - 1, "expert id");
    check_handle_values(all.rows + first, count, kDroppedRow, INT32_MAX, "row");
    check_handle_values(all.slots + first, count, kNoRow,
                        static_cast<int64_t>(output.num_ranks) * output.max_tokens - 1, "slot");
  };
  check_routes(handle.own, 0, sizes.own_size());
  if (sizes.num_domains > 1) {
    check_handle_values(handle.rail_tokens, sizes.num_domains, 0, output.max_tokens, "number of tokens");
    for (int d = 0; d < sizes.num_domains; d++) {
      const int64_t first = static_cast<int64_t>(d) * output.max_tokens * output.topk;
      check_routes(handle.rail, first, static_cast<int64_t>(handle.rail_tokens[d]) * output.topk);
    }
  }
  for (int64_t slot = 0; slot < received && sizes.has_expert_rows; slot++) {
    check_handle_values(handle.slot(slot), output.topk, kDroppedRow, output.rows() - 1, "place");
  }
}

OutputShape take_ht_handle(const HandleSpec& spec, const Group& group, const Tensor& route, const Tensor& slots,
                           const at::Device& device, Shape& shape, HtHandlePtrs& pointers) {
  const OutputShape output =
      output_shape(group.num_ranks(), spec.num_experts, spec.max_tokens, spec.topk, spec.layout, spec.capacity, 1);
  const int64_t num_slots = slots.dim() == 2 ? slots.size(0) : 0;
  EP_CHECK(num_slots <= static_cast<int64_t>(output.num_ranks) * output.max_tokens, "a handle of ", num_slots,
           " received rows, at most ", static_cast<int64_t>(output.num_ranks) * output.max_tokens);
  const HtHandleShape sizes = ht_handle_shape(output, group, spec.num_tokens, num_slots);
  check_tensor(route, "the handle's route", at::kInt, {sizes.route_size()}, device);
  check_tensor(slots, "the handle's slots", at::kInt, {sizes.num_slots, sizes.slot_words()}, device);
  shape = {output.num_ranks, static_cast<int>(spec.num_experts), output.topk, output.max_tokens};
  pointers = HtHandlePtrs::of(route.data_ptr<int32_t>(), slots.data_ptr<int32_t>(), sizes);
  if (device.is_cpu()) check_entries(pointers, sizes, spec, output, group.rank());
  return output;
}

#define EP_HT_CACHED_ARGS                                                                                      \
  at::TensorList xs, const OptionalTensor &x_scales, const Tensor &route, const Tensor &slots, EP_HANDLE_ARGS, \
      int64_t quant, bool zero_padding, int64_t num_sms

// Returns what was not given.
Moved run_ht_cached(std::string_view buffer, EP_HT_CACHED_ARGS, const MovedRefs* given) {
  const auto registered = find_group(buffer);
  Group& group = *registered->group;
  const at::Device device = device_of(group);
  const c10::DeviceGuard on_device(device);
  const HandleSpec spec = EP_HANDLE_SPEC;
  const Payload payload{xs, x_scales};
  HtDispatchParams p;
  p.steps = HtSteps::kCached;
  p.output = take_ht_handle(spec, group, route, slots, device, p.shape, p.handle);
  EP_CHECK(!xs.empty() && xs[0].dim() == 2 && xs[0].size(0) == num_tokens, "x must be [", num_tokens,
           ", hidden], as in the dispatch of the handle");
  RowSpec row = check_rows(xs[0], x_scales, device);
  row.topk = topk;
  check_payload(payload, num_tokens, device);
  p.quant = quant_of(quant);
  set_parts(p, payload);
  p.num_tokens = to_int(num_tokens, "number of tokens");
  p.zero_padding = zero_padding;
  p.num_sms = num_sms_of(num_sms);
  group.prepare(p);
  const DispatchSpec dispatch{num_experts, max_tokens, layout, capacity, 1, quant, zero_padding, num_sms};
  const OutputTypes types = output_types(row, dispatch, p.output);
  if (given != nullptr) {
    Apart apart;
    apart.reads("the handle's route", route);
    apart.reads("the handle's slots", slots);
    check_moved(*given, payload, p.output, types, device, apart);
  }
  Moved made;
  if (given == nullptr) made = allocate_moved(*registered, payload, p.output, types, device);
  set_moved(p, given != nullptr ? *given : MovedRefs::of(made));
  void* stream = registered->order.next_stream(device);
  group.dispatch(p, stream);
  registered->order.note_enqueued(device, stream);
  return made;
}

#define EP_HT_CACHED_PASS \
  xs, x_scales, route, slots, num_tokens, topk, num_experts, max_tokens, layout, capacity, quant, zero_padding, num_sms

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> ht_dispatch_cached(std::string_view buffer, const Tensor&,
                                                                      EP_HT_CACHED_ARGS) {
  return guarded([&] {
    Moved moved = run_ht_cached(buffer, EP_HT_CACHED_PASS, nullptr);
    auto [x1, x2, x3] = further(moved, route.device());
    return std::make_tuple(std::move(moved.xs[0]), std::move(moved.scales), std::move(x1), std::move(x2),
                           std::move(x3));
  });
}

void ht_dispatch_cached_out(std::string_view buffer, const Tensor&, EP_HT_CACHED_ARGS, at::TensorList out_xs,
                            const Tensor& out_scales) {
  guarded([&] {
    const MovedRefs given{out_xs, out_scales};
    run_ht_cached(buffer, EP_HT_CACHED_PASS, &given);
  });
}

// ---- combine

#define EP_HT_COMBINE_ARGS                                                                                  \
  const OptionalTensor &rows, const OptionalTensor &values, const Tensor &route, const Tensor &slots,       \
      const OptionalTensor &weights, const OptionalTensor &topk_idx, at::TensorList biases, EP_HANDLE_ARGS, \
      int64_t weighting, at::ScalarType out_dtype, at::ScalarType wire_dtype, int64_t num_sms

// Returns what was not given: rows and scalars.
std::pair<Tensor, Tensor> run_ht_combine(std::string_view buffer, EP_HT_COMBINE_ARGS, const Tensor* given) {
  const auto registered = find_group(buffer);
  Group& group = *registered->group;
  const at::Device device = device_of(group);
  const c10::DeviceGuard on_device(device);
  const HandleSpec spec = EP_HANDLE_SPEC;
  HtCombineParams p;
  p.output = take_ht_handle(spec, group, route, slots, device, p.shape, p.handle);
  p.weighting = weighting_of(weighting);
  p.num_tokens = to_int(num_tokens, "number of tokens");
  p.num_sms = num_sms_of(num_sms);
  Tensor out, out_values;
  if (rows) {
    EP_CHECK(rows->dim() >= 2, "rows have ", rows->dim(), " dimensions, must be shaped as dispatch's output");
    const int64_t hidden = rows->size(-1);
    const CombineArgs args{&*rows,
                           pointer_to(weights),
                           pointer_to(topk_idx),
                           biases,
                           hidden,
                           weighting,
                           rows->scalar_type(),
                           out_dtype,
                           wire_dtype,
                           num_sms};
    p.dtype = dtype_of(rows->scalar_type());
    p.out_dtype = dtype_of(out_dtype);
    p.wire_dtype = dtype_of(wire_dtype);
    p.hidden = to_int(hidden, "hidden");
    EP_CHECK(p.hidden > 0, "rows have no elements");
    check_tensor(*rows, "rows", rows->scalar_type(), row_shape(p.output, hidden), device);
    check_aligned(*rows, "rows");
    p.rows = pointer<void>(*rows);
    set_weights(p, args, spec, device);
    set_biases(p, args, spec, device);
    p.out = take_combined(args, {&route, &slots}, spec, device, given, out);
  }
  if (values) {
    check_tensor(*values, "values", at::kFloat, values_shape(p.output), device);
    p.has_values = true;
    p.values = values->data_ptr<float>();
    out_values = new_tensor({num_tokens, topk}, at::kFloat, device);
    p.out_values = out_values.data_ptr<float>();
  }
  void* stream = registered->order.next_stream(device);
  group.combine(p, stream);
  registered->order.note_enqueued(device, stream);
  return {std::move(out), std::move(out_values)};
}

#define EP_HT_COMBINE_PASS                                                                                            \
  rows, values, route, slots, weights, topk_idx, biases, num_tokens, topk, num_experts, max_tokens, layout, capacity, \
      weighting, out_dtype, wire_dtype, num_sms

std::tuple<Tensor, Tensor> ht_combine(std::string_view buffer, const Tensor&, EP_HT_COMBINE_ARGS) {
  return guarded([&] {
    auto [out, out_values] = run_ht_combine(buffer, EP_HT_COMBINE_PASS, nullptr);
    if (!rows) out = new_tensor({0}, out_dtype, route.device());
    if (!values) out_values = new_tensor({0}, at::kFloat, route.device());
    return std::make_tuple(std::move(out), std::move(out_values));
  });
}

void ht_combine_out(std::string_view buffer, const Tensor&, EP_HT_COMBINE_ARGS, const Tensor& out) {
  guarded([&] { run_ht_combine(buffer, EP_HT_COMBINE_PASS, &out); });
}

// ---- Tensors of the arena

Tensor arena_empty(std::string_view buffer, const Tensor&, at::IntArrayRef size, at::ScalarType dtype) {
  return guarded([&] {
    const auto registered = find_group(buffer);
    return arena_tensor(*registered, size, dtype, device_of(*registered->group));
  });
}

#define EP_HT_DISPATCH_SCHEMA                                                            \
  "str buffer, Tensor(a!) seq, Tensor[] xs, Tensor? x_scales, Tensor topk_idx, Tensor? " \
  "topk_weights, " EP_DISPATCH_CONFIG_SCHEMA
#define EP_HT_CACHED_SCHEMA                                                                                  \
  "str buffer, Tensor(a!) seq, Tensor[] xs, Tensor? x_scales, Tensor route, Tensor slots, " EP_HANDLE_SCHEMA \
  ", int quant, bool zero_padding, int num_sms"
#define EP_HT_COMBINE_SCHEMA                                                                                \
  "str buffer, Tensor(a!) seq, Tensor? rows, Tensor? values, Tensor route, Tensor slots, Tensor? weights, " \
  "Tensor? topk_idx, Tensor[] biases, " EP_HANDLE_SCHEMA                                                    \
  ", int weighting, ScalarType out_dtype, "                                                                 \
  "ScalarType wire_dtype, int num_sms"

}  // namespace

HtDispatched dispatch_ht(std::string_view buffer, const Tensor& x, const OptionalTensor& x_scales,
                         const Tensor& topk_idx, const OptionalTensor& topk_weights, const DispatchSpec& spec) {
  // DeepEP's callers name events to wait for, beside which nothing else may be waited for.
  find_group(buffer)->order.expect_several_streams();
  const HtTensors t = run_ht_dispatch(buffer, {x, x_scales}, topk_idx, topk_weights, spec, nullptr, true);
  if (t.moved.xs.empty()) return {{}, {}, {}, {}, {}, {}, {}, t.most_tokens, {}};
  return {t.moved.xs[0], t.moved.scales, t.weights, t.topk_idx, t.info, t.route, t.slots, t.most_tokens, t.demand};
}

void define_ht_ops(torch::Library& library) {
  library.def("ht_dispatch(" EP_HT_DISPATCH_SCHEMA
              ") -> (Tensor x, Tensor scales, Tensor weights, Tensor topk_idx, Tensor row_expert, Tensor info, "
              "Tensor route, Tensor slots, Tensor x1, Tensor x2, Tensor x3)");
  library.def("ht_dispatch_out(" EP_HT_DISPATCH_SCHEMA
              ", Tensor(b!)[] out_xs, Tensor(c!) out_scales, Tensor(d!) out_weights, Tensor(e!) out_topk_idx, "
              "Tensor(f!) out_row_expert, Tensor(g!) out_info, Tensor(h!) out_route, Tensor(i!) out_slots) -> ()");
  library.def("ht_dispatch_cached(" EP_HT_CACHED_SCHEMA
              ") -> (Tensor x, Tensor scales, Tensor x1, Tensor x2, Tensor x3)");
  library.def("ht_dispatch_cached_out(" EP_HT_CACHED_SCHEMA ", Tensor(b!)[] out_xs, Tensor(c!) out_scales) -> ()");
  library.def("ht_combine(" EP_HT_COMBINE_SCHEMA ") -> (Tensor out, Tensor out_values)");
  library.def("ht_combine_out(" EP_HT_COMBINE_SCHEMA ", Tensor(b!) out) -> ()");
  library.def("arena_empty(str buffer, Tensor(a!) seq, int[] size, ScalarType dtype) -> Tensor");
}

namespace {

direct::Op ops[] = {
    EP_OP(ht_dispatch),        EP_OP(ht_dispatch_out),        EP_OP(ht_combine),  EP_OP(ht_combine_out),
    EP_OP(ht_dispatch_cached), EP_OP(ht_dispatch_cached_out), EP_OP(arena_empty),
};

}  // namespace
}  // namespace ep

EP_IMPLEMENT(ep::ops)
