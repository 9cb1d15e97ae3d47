// Gradients of dispatch and combine, of both modes. The backward of a dispatch is a combine of the gradients of its
// rows; the backward of a combine is a dispatch of the gradients of its sums. Both go by the ops themselves, so that a
// compiler traces them and a second derivative exists. docs/training.md says what ranks must do alike.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "torch/ops/gradient_functions.h"
#include "torch/ops/op_types.h"
#include "torch/ops/ops.h"
#include "torch/ops/run.h"
#include "torch/ops/saved_routing.h"

namespace ep {
namespace {

using namespace gradients;
using at::Tensor;
using c10::SymInt;

// The weights that a combine applies. Those of the dispatch are in the handle: that they are given, too, is for
// gradients.
const Optional& applied(const Optional& weights, const CombineConfig& config) {
  return config.weighting == Weighting::kHome ? weights : kNone;
}

void require_weights(const Optional& weights, const CombineConfig& config) {
  EP_CHECK(weights || config.weighting == Weighting::kNone,
           "the gradient of a combine with the dispatch's weights needs them: give the weights that dispatch returned");
}

// ---- The ops above autograd

// Also where the caller left it open.
SymInt capacity_of(const Tensor& rows, const RoutingNumbers& routing) {
  if (routing.layout == OutputLayout::kRankMajor) return routing.max_tokens;
  return routing.layout == OutputLayout::kExpertMajor ? rows.sym_size(1) : rows.sym_size(0);
}

variable_list list_of(at::TensorList xs, const Optional& scales) {
  variable_list all = xs.vec();
  if (scales) all.push_back(*scales);
  return all;
}

// x, x1, x2, x3 and scales in the order of `xs` and scales.
template <class Result>
variable_list rows_of(const Result& made, size_t num_xs, bool has_scales) {
  constexpr size_t kFirst = std::tuple_size_v<Result> - 3;
  const Tensor more[] = {std::get<kFirst>(made), std::get<kFirst + 1>(made), std::get<kFirst + 2>(made)};
  variable_list rows{std::get<0>(made)};
  for (size_t i = 1; i < num_xs; i++) rows.push_back(more[i - 1]);
  if (has_scales) rows.push_back(std::get<1>(made));
  return rows;
}
template <class Result>
void put_rows(Result& made, const variable_list& rows, size_t num_xs, bool has_scales) {
  constexpr size_t kFirst = std::tuple_size_v<Result> - 3;
  Tensor* const more[] = {&std::get<kFirst>(made), &std::get<kFirst + 1>(made), &std::get<kFirst + 2>(made)};
  std::get<0>(made) = rows[0];
  for (size_t i = 1; i < num_xs; i++) *more[i - 1] = rows[i];
  if (has_scales) std::get<1>(made) = rows[num_xs];
}

using Sending = std::function<Sent()>;
using Combining = std::function<Combined()>;

// A weight's gradient comes home from the owner of its expert alone.
void check_differentiable(at::IntArrayRef config, const Optional& topk_weights) {
  TORCH_CHECK_VALUE(!wants_gradient(topk_weights) || !dispatch_config(config).all_weights,
                    "topk_weights want a gradient, which a dispatch with all_weights has not got");
}

torch_ops::LlDispatched ll_dispatch(const Tensor& seq, const Tensor& x, const Optional& x_scales,
                                    const Tensor& topk_idx, const Optional& topk_weights, SymInt capacity,
                                    at::IntArrayRef config) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ll_dispatch().call(seq, x, x_scales, topk_idx, topk_weights, capacity, config);
  };
  if (!wants_gradient(x, x_scales, topk_weights)) return run();
  check_differentiable(config, topk_weights);
  torch_ops::LlDispatched made;
  const Sending send = [&]() -> Sent {
    made = run();
    auto& [rows, scales, weights, ids, experts, info, handle] = made;
    variable_list sent{rows};
    if (x_scales) sent.push_back(scales);
    const DispatchConfig c = dispatch_config(config);
    return {sent, weights, SavedRouting::of(seq, handle, {}, x.sym_size(0), capacity_of(rows, c), c)};
  };
  const auto results = Dispatch::apply(at::TensorList(list_of(x, x_scales)), topk_weights, at::TensorList(), send);
  std::get<0>(made) = results[0];
  if (x_scales) std::get<1>(made) = results[1];
  std::get<2>(made) = results.back();
  return made;
}

// x and topk_weights: carriers of what was sent.
torch_ops::LlReceived ll_dispatch_recv(const Tensor& seq, const Tensor& handle, at::ScalarType dtype, SymInt hidden,
                                       SymInt num_scales, at::ScalarType scale_dtype, SymInt num_tokens, bool is_idx64,
                                       SymInt capacity, at::IntArrayRef config, const Optional& x,
                                       const Optional& topk_weights) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ll_dispatch_recv().call(seq, handle, dtype, hidden, num_scales, scale_dtype, num_tokens, is_idx64,
                                              capacity, config, kNone, kNone);
  };
  if (!wants_gradient(x, topk_weights)) return run();
  check_differentiable(config, topk_weights);
  EP_CHECK(x.has_value(), "the gradient of a dispatch in two calls needs the carrier of x");
  torch_ops::LlReceived made;
  const Sending send = [&]() -> Sent {
    made = run();
    const DispatchConfig c = dispatch_config(config);
    const Tensor& rows = std::get<0>(made);
    return {{rows}, std::get<2>(made), SavedRouting::of(seq, handle, {}, num_tokens, capacity_of(rows, c), c)};
  };
  const auto results = Dispatch::apply(at::TensorList(*x), topk_weights, at::TensorList(), send);
  std::get<0>(made) = results[0];
  std::get<2>(made) = results[1];
  return made;
}

torch_ops::HtDispatched ht_dispatch(const Tensor& seq, at::TensorList xs, const Optional& x_scales,
                                    const Tensor& topk_idx, const Optional& topk_weights, SymInt capacity,
                                    at::IntArrayRef config) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ht_dispatch().call(seq, xs, x_scales, topk_idx, topk_weights, capacity, config);
  };
  if (!wants_gradient(xs, x_scales, topk_weights)) return run();
  torch_ops::HtDispatched made;
  const Sending send = [&]() -> Sent {
    made = run();
    const DispatchConfig c = dispatch_config(config);
    return {rows_of(made, xs.size(), x_scales.has_value()), std::get<2>(made),
            SavedRouting::of(seq, std::get<6>(made), std::get<7>(made), xs[0].sym_size(0),
                             capacity_of(std::get<0>(made), c), c)};
  };
  const auto results = Dispatch::apply(at::TensorList(list_of(xs, x_scales)), topk_weights, at::TensorList(), send);
  put_rows(made, results, xs.size(), x_scales.has_value());
  std::get<2>(made) = results.back();
  return made;
}

torch_ops::HtRouted ht_dispatch_routed(const Tensor& seq, at::TensorList xs, const Optional& x_scales,
                                       const Tensor& topk_idx, const Optional& topk_weights, const Tensor& info,
                                       const Tensor& route, SymInt num_rows, SymInt num_slots, at::IntArrayRef config) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ht_dispatch_routed().call(seq, xs, x_scales, topk_idx, topk_weights, info, route, num_rows,
                                                num_slots, config);
  };
  if (!wants_gradient(xs, x_scales, topk_weights)) return run();
  torch_ops::HtRouted made;
  const Sending send = [&]() -> Sent {
    made = run();
    const DispatchConfig c = dispatch_config(config);
    return {rows_of(made, xs.size(), x_scales.has_value()), std::get<2>(made),
            SavedRouting::of(seq, route, std::get<5>(made), xs[0].sym_size(0), capacity_of(std::get<0>(made), c), c)};
  };
  const auto results = Dispatch::apply(at::TensorList(list_of(xs, x_scales)), topk_weights, at::TensorList(), send);
  put_rows(made, results, xs.size(), x_scales.has_value());
  std::get<2>(made) = results.back();
  return made;
}

void ht_dispatch_out(const Tensor& seq, at::TensorList xs, const Optional& x_scales, const Tensor& topk_idx,
                     const Optional& topk_weights, SymInt capacity, at::IntArrayRef config, at::TensorList out_xs,
                     const Tensor& out_scales, const Tensor& out_weights, const Tensor& out_topk_idx,
                     const Tensor& out_row_expert, const Tensor& out_info, const Tensor& out_route,
                     const Tensor& out_slots) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    torch_ops::ht_dispatch_out().call(seq, xs, x_scales, topk_idx, topk_weights, capacity, config, out_xs, out_scales,
                                      out_weights, out_topk_idx, out_row_expert, out_info, out_route, out_slots);
  };
  variable_list rows = list_of(out_xs, x_scales ? Optional(out_scales) : kNone), written = rows;
  written.push_back(out_weights);
  forget(written);
  if (!wants_gradient(xs, x_scales, topk_weights)) return run();
  const Sending send = [&]() -> Sent {
    run();
    const DispatchConfig c = dispatch_config(config);
    return {rows, out_weights,
            SavedRouting::of(seq, out_route, out_slots, xs[0].sym_size(0), capacity_of(out_xs[0], c), c)};
  };
  Dispatch::apply(at::TensorList(list_of(xs, x_scales)), topk_weights, at::TensorList(written), send);
}

torch_ops::HtCached ht_dispatch_cached(const Tensor& seq, at::TensorList xs, const Optional& x_scales,
                                       const Tensor& route, const Tensor& slots, SymInt num_tokens, SymInt capacity,
                                       at::IntArrayRef config) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ht_dispatch_cached().call(seq, xs, x_scales, route, slots, num_tokens, capacity, config);
  };
  if (!wants_gradient(xs, x_scales)) return run();
  torch_ops::HtCached made;
  const Sending send = [&]() -> Sent {
    made = run();
    return {rows_of(made, xs.size(), x_scales.has_value()),
            {},
            SavedRouting::of(seq, route, slots, num_tokens, capacity, dispatch_config(config))};
  };
  const auto results = Dispatch::apply(at::TensorList(list_of(xs, x_scales)), kNone, at::TensorList(), send);
  put_rows(made, results, xs.size(), x_scales.has_value());
  return made;
}

void ht_dispatch_cached_out(const Tensor& seq, at::TensorList xs, const Optional& x_scales, const Tensor& route,
                            const Tensor& slots, SymInt num_tokens, SymInt capacity, at::IntArrayRef config,
                            at::TensorList out_xs, const Tensor& out_scales) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    torch_ops::ht_dispatch_cached_out().call(seq, xs, x_scales, route, slots, num_tokens, capacity, config, out_xs,
                                             out_scales);
  };
  const variable_list written = list_of(out_xs, x_scales ? Optional(out_scales) : kNone);
  forget(written);
  if (!wants_gradient(xs, x_scales)) return run();
  const Sending send = [&]() -> Sent {
    run();
    return {written, {}, SavedRouting::of(seq, route, slots, num_tokens, capacity, dispatch_config(config))};
  };
  Dispatch::apply(at::TensorList(list_of(xs, x_scales)), kNone, at::TensorList(written), send);
}

Tensor ll_combine(const Tensor& seq, const Tensor& rows, const Tensor& handle, const Optional& weights,
                  const Optional& topk_idx, at::TensorList biases, SymInt num_tokens, SymInt capacity,
                  at::IntArrayRef config) {
  const CombineConfig c = combine_config(config);
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ll_combine().call(seq, rows, handle, applied(weights, c), topk_idx, biases, num_tokens, capacity,
                                        config);
  };
  if (!wants_gradient(rows, weights, biases)) return run();
  require_weights(weights, c);
  const CombineGiven given{rows, topk_idx, c, SavedRouting::of(seq, handle, {}, num_tokens, capacity, c)};
  const Combining combine = [&]() -> Combined { return {run(), {}}; };
  return Combine::apply(Optional(rows), kNone, weights, biases, at::TensorList(), given, combine)[0];
}

void ll_combine_out(const Tensor& seq, const Tensor& rows, const Tensor& handle, const Optional& weights,
                    const Optional& topk_idx, at::TensorList biases, SymInt num_tokens, SymInt capacity,
                    at::IntArrayRef config, const Tensor& out) {
  const CombineConfig c = combine_config(config);
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    torch_ops::ll_combine_out().call(seq, rows, handle, applied(weights, c), topk_idx, biases, num_tokens, capacity,
                                     config, out);
  };
  forget(out);
  if (!wants_gradient(rows, weights, biases)) return run();
  require_weights(weights, c);
  const CombineGiven given{rows, topk_idx, c, SavedRouting::of(seq, handle, {}, num_tokens, capacity, c)};
  const Combining combine = [&]() -> Combined {
    run();
    return {out, {}};
  };
  Combine::apply(Optional(rows), kNone, weights, biases, at::TensorList(out), given, combine);
}

// `carrier` of the rows that were sent; `rows`, weights and topk_idx as they were given there.
Tensor ll_combine_recv(const Tensor& seq, const Tensor& handle, at::TensorList biases, at::ScalarType rows_dtype,
                       SymInt hidden, SymInt num_tokens, SymInt capacity, at::IntArrayRef config,
                       const Optional& carrier, const Optional& rows, const Optional& weights,
                       const Optional& topk_idx) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ll_combine_recv().call(seq, handle, biases, rows_dtype, hidden, num_tokens, capacity, config, {},
                                             {}, {}, {});
  };
  if (!wants_gradient(carrier, weights, biases)) return run();
  const CombineConfig c = combine_config(config);
  EP_CHECK(carrier.has_value(), "the gradient of a combine in two calls needs the carrier of its rows");
  require_weights(weights, c);
  const CombineGiven given{rows, topk_idx, c, SavedRouting::of(seq, handle, {}, num_tokens, capacity, c)};
  const Combining combine = [&]() -> Combined { return {run(), {}}; };
  return Combine::apply(carrier, kNone, weights, biases, at::TensorList(), given, combine)[0];
}

Tensor ll_combine_weights(const Tensor& seq, const Tensor& values, const Tensor& handle, SymInt num_tokens,
                          SymInt capacity, at::IntArrayRef config) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ll_combine_weights().call(seq, values, handle, num_tokens, capacity, config);
  };
  if (!wants_gradient(values)) return run();
  const CombineGiven given{{}, {}, {}, SavedRouting::of(seq, handle, {}, num_tokens, capacity, combine_config(config))};
  const Combining combine = [&]() -> Combined { return {{}, run()}; };
  return Combine::apply(kNone, Optional(values), kNone, at::TensorList(), at::TensorList(), given, combine)[0];
}

torch_ops::HtCombined ht_combine(const Tensor& seq, const Optional& rows, const Optional& values, const Tensor& route,
                                 const Tensor& slots, const Optional& weights, const Optional& topk_idx,
                                 at::TensorList biases, SymInt num_tokens, SymInt capacity, at::IntArrayRef config) {
  const CombineConfig c = combine_config(config);
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::ht_combine().call(seq, rows, values, route, slots, applied(weights, c), topk_idx, biases,
                                        num_tokens, capacity, config);
  };
  if (!wants_gradient(rows, values, weights, biases)) return run();
  if (rows) require_weights(weights, c);
  const CombineGiven given{rows, topk_idx, c, SavedRouting::of(seq, route, slots, num_tokens, capacity, c)};
  torch_ops::HtCombined made;
  const Combining combine = [&]() -> Combined {
    made = run();
    return {std::get<0>(made), std::get<1>(made)};
  };
  const auto results = Combine::apply(rows, values, weights, biases, at::TensorList(), given, combine);
  if (rows) std::get<0>(made) = results.front();
  if (values) std::get<1>(made) = results.back();
  return made;
}

void ht_combine_out(const Tensor& seq, const Optional& rows, const Optional& values, const Tensor& route,
                    const Tensor& slots, const Optional& weights, const Optional& topk_idx, at::TensorList biases,
                    SymInt num_tokens, SymInt capacity, at::IntArrayRef config, const Tensor& out) {
  const CombineConfig c = combine_config(config);
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    torch_ops::ht_combine_out().call(seq, rows, values, route, slots, applied(weights, c), topk_idx, biases, num_tokens,
                                     capacity, config, out);
  };
  forget(out);
  if (!wants_gradient(rows, weights, biases)) return run();
  require_weights(weights, c);
  const CombineGiven given{rows, topk_idx, c, SavedRouting::of(seq, route, slots, num_tokens, capacity, c)};
  const Combining combine = [&]() -> Combined {
    run();
    return {out, {}};
  };
  Combine::apply(rows, kNone, weights, biases, at::TensorList(out), given, combine);
}

// ---- Carriers

// A tensor of no memory that stands for x in the graph of gradients: what is sent in one call and received in another,
// or arrives in a dtype that has no gradient.
Tensor new_carrier(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::zeros({}, options).expand(sizes);
}

Tensor carrier(const Tensor& x) { return new_carrier(x.sizes(), x.options()); }

struct Carry : torch::autograd::Function<Carry> {
  static Tensor forward(AutogradContext*, const Tensor& x) {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::carrier().call(x);
  }
  static variable_list backward(AutogradContext*, const variable_list& given) { return given; }
};
Tensor carrier_autograd(const Tensor& x) { return Carry::apply(x); }

// A carrier of the rows that x has become in the dispatch of a handle, of shape `sizes`.
Tensor row_carrier(const Tensor&, const Tensor& x, const Tensor&, const Optional&, at::IntArrayRef sizes,
                   at::IntArrayRef) {
  return new_carrier(sizes, x.options());
}

Tensor row_carrier_autograd(const Tensor& seq, const Tensor& x, const Tensor& handle, const Optional& slots,
                            at::SymIntArrayRef sizes, at::IntArrayRef config) {
  const auto run = [&] {
    const at::AutoDispatchBelowAutograd below;
    return torch_ops::row_carrier().call(seq, x, handle, slots, sizes, config);
  };
  if (!wants_gradient(x)) return run();
  const Sending send = [&]() -> Sent {
    const Tensor rows = run();
    const DispatchConfig c = dispatch_config(config);
    return {
        {rows}, {}, SavedRouting::of(seq, handle, slots ? *slots : Tensor(), x.sym_size(0), capacity_of(rows, c), c)};
  };
  return Dispatch::apply(at::TensorList(x), kNone, at::TensorList(), send)[0];
}

// Values that are computed otherwise, with the gradient of a carrier.
Tensor carried(const Tensor& carrier, const Tensor& values) {
  TORCH_CHECK_VALUE(carrier.sizes() == values.sizes(), "values have shape ", values.sizes(), ", their carrier ",
                    carrier.sizes());
  return values.clone();
}

struct Carried : torch::autograd::Function<Carried> {
  static Tensor forward(AutogradContext* ctx, const Tensor& carrier, const Tensor& values) {
    const at::AutoDispatchBelowAutograd below;
    ctx->saved_data["type"] = static_cast<int64_t>(carrier.scalar_type());
    return torch_ops::carried().call(carrier, values);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    return {given[0].to(static_cast<at::ScalarType>(ctx->saved_data["type"].toInt())), {}};
  }
};
Tensor carried_autograd(const Tensor& carrier, const Tensor& values) { return Carried::apply(carrier, values); }

}  // namespace
}  // namespace ep

TORCH_LIBRARY_FRAGMENT(nccl_ep, library) {
  library.def("carrier(Tensor x) -> Tensor");
  library.def("carried(Tensor carrier, Tensor values) -> Tensor");
  library.def(
      "row_carrier(Tensor(a!) seq, Tensor x, Tensor handle, Tensor? slots, SymInt[] sizes, int[] config) -> Tensor");
}

#define EP_CARRIERS(key)                           \
  TORCH_LIBRARY_IMPL(nccl_ep, key, library) {      \
    library.impl("carrier", &ep::carrier);         \
    library.impl("carried", &ep::carried);         \
    library.impl("row_carrier", &ep::row_carrier); \
  }
EP_CARRIERS(CPU)
EP_CARRIERS(CUDA)

TORCH_LIBRARY_IMPL(nccl_ep, Autograd, library) {
  library.impl("carrier", &ep::carrier_autograd);
  library.impl("carried", &ep::carried_autograd);
  library.impl("row_carrier", &ep::row_carrier_autograd);
#define EP_GRADIENT(op) library.impl(#op, &ep::op);
  EP_OPS_WITH_GRADIENT(EP_GRADIENT)
}
