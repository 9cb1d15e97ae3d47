// Dispatch in high throughput. With exact sizes (capacity -1) it asks the other ranks how much will come before it
// makes its outputs; every other knows their sizes.
#include "torch/ops/ht_dispatch_ops.h"

#include <torch/library.h>

#include <tuple>
#include <vector>

#include "runtime/call.h"
#include "runtime/checks.h"
#include "torch/ops/fast_call.h"
#include "torch/ops/ht_payload.h"
#include "torch/ops/ops.h"

namespace ep {
namespace {

using at::Tensor;

struct HtTensors {
  PayloadOutputs moved;
  Tensor weights, topk_idx, row_expert, info, route, slots;
  // Where sizes are exact:
  int64_t num_rows = 0, num_slots = 0;
  int64_t most_tokens = 0;      // of any rank
  std::vector<int64_t> demand;  // of each local expert
};

struct HtRefs {  // as DispatchRefs
  PayloadRefs moved;
  const Tensor &weights, &topk_idx, &row_expert, &info, &route, &slots;

  static HtRefs of(const HtTensors& t) {
    return {PayloadRefs::of(t.moved), t.weights, t.topk_idx, t.row_expert, t.info, t.route, t.slots};
  }
};

// What the first op of a dispatch of exact sizes tells the host.
struct HostSizes {
  int64_t rows = 0, slots = 0, most_tokens = 0;
  std::vector<int64_t> demand;
};

HostSizes ask_for_sizes(Group& group, HtDispatchParams p, void* stream) {
  std::vector<int64_t> words(2 + p.shape.local_experts(), 0);
  HostSizes sizes;
  p.host_sizes = words.data();
  p.host_most_tokens = &sizes.most_tokens;
  group.run(p, stream);
  sizes.rows = words[0];
  sizes.slots = words[1];
  sizes.demand.assign(words.begin() + 2, words.end());
  return sizes;
}

// Of exact sizes the info and the route are there already. What the layout has not got: as in allocate_outputs().
void allocate_received(HtTensors& t, const OutputTypes& types, const OutputShape& output, const HtHandleShape& handle,
                       const at::Device& device) {
  const bool is_exact = t.info.defined();
  const int64_t route_size = handle.route_size(), slots_size[] = {handle.num_slots, handle.slot_words()};
  c10::SmallVector<NewTensor, 6> wanted;
  const auto add = [&](bool is_there, NewTensor tensor) {
    if (is_there || !PackedResultsScope::is_on()) wanted.push_back(tensor);
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
                    AliasCheck& aliases) {
  check_tensor(t.weights, "out_weights", at::kFloat, types.weights, device);
  check_tensor(t.topk_idx, "out_topk_idx", types.idx_type, types.topk_idx, device);
  check_tensor(t.row_expert, "out_row_expert", at::kInt, types.row_expert, device);
  check_tensor(t.info, "out_info", at::kInt, types.info, device);
  check_tensor(t.route, "route", at::kInt, {handle.route_size()}, device);
  check_tensor(t.slots, "slots", at::kInt, {handle.num_slots, handle.slot_words()}, device);
  aliases.writes("out_weights", t.weights);
  aliases.writes("out_topk_idx", t.topk_idx);
  aliases.writes("out_row_expert", t.row_expert);
  aliases.writes("out_info", t.info);
  aliases.writes("route", t.route);
  aliases.writes("slots", t.slots);
}

// What the first op of a dispatch of exact sizes has made.
struct Routed {
  const Tensor &info, &route;
  int64_t rows, slots;
};

struct HtHow {
  const HtRefs* given = nullptr;  // outputs; null: new ones
  // Exact sizes: if a rank has more than max_tokens, nothing is sent, on all ranks alike.
  bool asks_first = false;
  // Exact sizes in two ops, between which a compiler learns the sizes: the first op alone, or what it made.
  bool only_routes = false;
  const Routed* routed = nullptr;
};

HtDispatchParams params_of(const Group& group, const InputTypes& row, const HtPayload& payload, const Tensor& topk_idx,
                           const OptionalTensor& topk_weights, const DispatchConfig& config, int64_t capacity) {
  HtDispatchParams p;
  p.output = output_shape(group.num_ranks(), config, capacity);
  p.shape = {group.num_ranks(), static_cast<int>(config.num_experts), p.output.topk, p.output.max_tokens};
  p.options = config;
  set_parts(p, payload);
  p.topk_idx = topk_idx.data_ptr();
  p.is_idx64 = row.is_idx64;
  p.topk_weights = topk_weights ? topk_weights->data_ptr<float>() : nullptr;
  p.num_tokens = to_int(row.num_tokens, "number of tokens");
  return p;
}

// The first op: all ranks tell one another how much will come, and the host learns it.
void route_exactly(HtTensors& t, Group& group, HtDispatchParams& p, int64_t num_tokens, const at::Device& device,
                   void* stream) {
  t.info = new_tensor({p.output.info_size()}, at::kInt, device);
  const HtHandleShape route = ht_handle_shape(p.output, group, num_tokens, 0);
  t.route = new_handle({route.route_size()}, device);
  p.info = t.info.data_ptr<int32_t>();
  p.handle = HtHandlePtrs::of(t.route.data_ptr<int32_t>(), nullptr, route);
  HostSizes sizes = ask_for_sizes(group, p, stream);
  t.num_rows = sizes.rows;
  t.num_slots = sizes.slots;
  t.most_tokens = sizes.most_tokens;
  t.demand = std::move(sizes.demand);
}

// Returns what was not given.
HtTensors run_ht_dispatch(const at::Tensor& seq, const HtPayload& payload, const Tensor& topk_idx,
                          const OptionalTensor& topk_weights, int64_t capacity, const DispatchConfig& config,
                          const HtHow& how = {}) {
  const auto [registered, group, device, on_device] = OnGroup(seq);
  const Beside::Turn turn = how.only_routes ? Beside::Turn() : registered->beside.take();
  EP_CHECK(!payload.xs.empty(), "no tensor to dispatch");
  const InputTypes row = check_inputs(payload.xs[0], row_scales_of(payload.scales, config.quant), topk_idx,
                                      topk_weights, config.topk, device);
  check_payload(payload, row.num_tokens, device);
  const bool is_exact = capacity == kExactCapacity;
  EP_CHECK(!is_exact || config.layout != OutputLayout::kExpertMajor,
           "expert_major needs a capacity: its rows have no exact number");
  EP_CHECK(!is_exact || how.given == nullptr, "outputs of exact sizes cannot be given");
  HtDispatchParams p = params_of(group, row, payload, topk_idx, topk_weights, config, is_exact ? INT32_MAX : capacity);
  if (is_exact) {
    if (!how.asks_first) check_tokens(p.num_tokens, p.shape);
    p.variant = how.routed != nullptr ? HtVariant::kSend : HtVariant::kRoute;
  }
  HtTensors t;
  t.num_slots = static_cast<int64_t>(group.num_ranks()) * config.max_tokens;
  if (how.routed == nullptr) group.prepare(p);  // refuses what does not fit before memory is taken for it
  void* stream = registered->order.next_stream(device);
  if (is_exact) {
    if (how.routed == nullptr) {
      route_exactly(t, group, p, row.num_tokens, device, stream);
      if (how.only_routes || t.most_tokens > config.max_tokens) return t;  // the latter: asks_first
    } else {
      t.info = how.routed->info;
      t.route = how.routed->route;
      t.num_rows = how.routed->rows;
      t.num_slots = how.routed->slots;
    }
    p.variant = HtVariant::kSend;
    p.output = output_shape(group.num_ranks(), config,
                            p.output.layout == OutputLayout::kRankMajor ? config.max_tokens : t.num_rows);
  }
  p.arrivals = registered->take_arrivals();
  if (p.arrivals.state != nullptr) p.arrivals.check(p.output);
  const OutputTypes types = output_types(row, p.options.quant, p.output);
  const HtHandleShape handle = ht_handle_shape(p.output, group, row.num_tokens, t.num_slots);
  if (how.routed != nullptr) {
    check_tensor(t.info, "info", at::kInt, types.info, device);
    check_tensor(t.route, "route", at::kInt, {handle.route_size()}, device);
  }
  if (how.given != nullptr) {
    AliasCheck aliases;
    aliases.reads("topk_idx", topk_idx);
    aliases.reads("topk_weights", pointer_to(topk_weights));
    check_payload_outputs(how.given->moved, payload, p.output, types, device, aliases);
    check_received(*how.given, types, handle, device, aliases);
  } else {
    t.moved = allocate_payload(*registered, payload, p.output, types, device);
    allocate_received(t, types, p.output, handle, device);
  }
  const HtRefs out = how.given != nullptr ? *how.given : HtRefs::of(t);
  set_payload_outputs(p, out.moved);
  p.handle = HtHandlePtrs::of(out.route.data_ptr<int32_t>(), out.slots.data_ptr<int32_t>(), handle);
  p.info = out.info.data_ptr<int32_t>();
  p.row_expert = pointer<int32_t>(out.row_expert);
  p.out_topk_idx = pointer<void>(out.topk_idx);
  p.out_weights = pointer<float>(out.weights);
  if (is_exact) group.prepare(p);  // the second operation
  group.run(p, stream);
  registered->order.note_enqueued(device, stream);
  turn.note_end();
  return t;
}

using HtDispatchResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

HtDispatchResult ht_dispatch(const Tensor& seq, at::TensorList xs, const OptionalTensor& x_scales,
                             const Tensor& topk_idx, const OptionalTensor& topk_weights, int64_t capacity,
                             at::IntArrayRef config) {
  return guarded([&] {
    auto t = run_ht_dispatch(seq, {xs, x_scales}, topk_idx, topk_weights, capacity, dispatch_config(config));
    auto [x1, x2, x3] = extra(t.moved, t.info.device());
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

void ht_dispatch_out(const Tensor& seq, at::TensorList xs, const OptionalTensor& x_scales, const Tensor& topk_idx,
                     const OptionalTensor& topk_weights, int64_t capacity, at::IntArrayRef config,
                     at::TensorList out_xs, const Tensor& out_scales, const Tensor& out_weights,
                     const Tensor& out_topk_idx, const Tensor& out_row_expert, const Tensor& out_info,
                     const Tensor& out_route, const Tensor& out_slots) {
  guarded([&] {
    const HtRefs given{{out_xs, out_scales}, out_weights, out_topk_idx, out_row_expert, out_info, out_route, out_slots};
    run_ht_dispatch(seq, {xs, x_scales}, topk_idx, topk_weights, capacity, dispatch_config(config), {.given = &given});
  });
}

// ---- Exact sizes in two ops, for compilers: between them `size_at` makes lengths of the numbers

std::tuple<Tensor, Tensor, Tensor> ht_route(const Tensor& seq, at::TensorList xs, const OptionalTensor& x_scales,
                                            const Tensor& topk_idx, const OptionalTensor& topk_weights,
                                            at::IntArrayRef config) {
  return guarded([&] {
    const HtTensors t = run_ht_dispatch(seq, {xs, x_scales}, topk_idx, topk_weights, kExactCapacity,
                                        dispatch_config(config), {.only_routes = true});
    Tensor sizes = new_tensor({2}, at::kLong, at::kCPU);
    sizes.data_ptr<int64_t>()[0] = t.num_rows;
    sizes.data_ptr<int64_t>()[1] = t.num_slots;
    return std::make_tuple(t.info, t.route, std::move(sizes));
  });
}

// Of a tensor in host memory.
c10::SymInt size_at(const Tensor& sizes, int64_t index) { return sizes[index].item<int64_t>(); }

using HtRoutedResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

HtRoutedResult ht_dispatch_routed(const Tensor& seq, at::TensorList xs, const OptionalTensor& x_scales,
                                  const Tensor& topk_idx, const OptionalTensor& topk_weights, const Tensor& info,
                                  const Tensor& route, int64_t num_rows, int64_t num_slots, at::IntArrayRef config) {
  return guarded([&] {
    const Routed routed{info, route, num_rows, num_slots};
    HtTensors t = run_ht_dispatch(seq, {xs, x_scales}, topk_idx, topk_weights, kExactCapacity, dispatch_config(config),
                                  {.routed = &routed});
    auto [x1, x2, x3] = extra(t.moved, info.device());
    return HtRoutedResult{std::move(t.moved.xs[0]),
                          std::move(t.moved.scales),
                          std::move(t.weights),
                          std::move(t.topk_idx),
                          std::move(t.row_expert),
                          std::move(t.slots),
                          std::move(x1),
                          std::move(x2),
                          std::move(x3)};
  });
}

// ---- Tensors of the arena

Tensor arena_empty(const Tensor& seq, at::IntArrayRef size, at::ScalarType dtype) {
  return guarded([&] {
    const auto registered = find_group(seq);
    return arena_tensor(*registered, size, dtype, device_of(*registered->group));
  });
}

#define EP_HT_DISPATCH_SCHEMA                                                \
  "Tensor(a!) seq, Tensor[] xs, Tensor? x_scales, Tensor topk_idx, Tensor? " \
  "topk_weights, " EP_DISPATCH_CONFIG_SCHEMA
}  // namespace

HtDispatched dispatch_ht(const at::Tensor& seq, const Tensor& x, const OptionalTensor& x_scales, const Tensor& topk_idx,
                         const OptionalTensor& topk_weights, int64_t capacity, const DispatchConfig& config) {
  // DeepEP's callers name events to wait for, beside which nothing else may be waited for.
  find_group(seq)->order.expect_several_streams();
  const HtTensors t =
      run_ht_dispatch(seq, {x, x_scales}, topk_idx, topk_weights, capacity, config, {.asks_first = true});
  if (t.moved.xs.empty()) return {{}, {}, {}, {}, {}, {}, {}, t.most_tokens, {}};
  return {t.moved.xs[0], t.moved.scales, t.weights, t.topk_idx, t.info, t.route, t.slots, t.most_tokens, t.demand};
}

namespace {

fast_call::Op ht_dispatch_ops[] = {EP_OP(ht_dispatch), EP_OP(ht_dispatch_out), EP_OP(ht_route),
                                   EP_OP(ht_dispatch_routed), EP_OP(arena_empty)};

}  // namespace
}  // namespace ep

TORCH_LIBRARY_FRAGMENT(nccl_ep, library) {
  library.def("ht_dispatch(" EP_HT_DISPATCH_SCHEMA
              ") -> (Tensor x, Tensor scales, Tensor weights, Tensor topk_idx, Tensor row_expert, Tensor info, "
              "Tensor route, Tensor slots, Tensor x1, Tensor x2, Tensor x3)");
  library.def("ht_dispatch_out(" EP_HT_DISPATCH_SCHEMA
              ", Tensor(b!)[] out_xs, Tensor(c!) out_scales, Tensor(d!) out_weights, Tensor(e!) out_topk_idx, "
              "Tensor(f!) out_row_expert, Tensor(g!) out_info, Tensor(h!) out_route, Tensor(i!) out_slots) -> ()");
  library.def(
      "ht_route(Tensor(a!) seq, Tensor[] xs, Tensor? x_scales, Tensor topk_idx, Tensor? topk_weights, int[] config) -> "
      "(Tensor info, Tensor route, Tensor sizes)");
  library.def("size_at(Tensor sizes, int index) -> SymInt");
  library.def(
      "ht_dispatch_routed(Tensor(a!) seq, Tensor[] xs, Tensor? x_scales, Tensor topk_idx, Tensor? topk_weights, "
      "Tensor(b!) info, Tensor(c!) route, SymInt num_rows, SymInt num_slots, int[] config) -> (Tensor x, Tensor "
      "scales, "
      "Tensor weights, Tensor topk_idx, Tensor row_expert, Tensor slots, Tensor x1, Tensor x2, Tensor x3)");
  library.def("arena_empty(Tensor(a!) seq, int[] size, ScalarType dtype) -> Tensor");
}

EP_IMPLEMENT(ht_dispatch_ops)

TORCH_LIBRARY_IMPL(nccl_ep, CPU, library) { library.impl("size_at", &ep::size_at); }
