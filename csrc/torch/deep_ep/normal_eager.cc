// The methods of DeepEP's normal mode in one call of C++ (torch/binding/eager.h), for ranks of one domain.
// nccl_ep/deep_ep/v1/normal.py has the long way, which defines them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <utility>

#include "base/math.h"
#include "layout/ht/handle.h"
#include "torch/binding/eager.h"
#include "torch/ops/arena_pool.h"
#include "torch/ops/arguments.h"

namespace ep::eager {
namespace {

using at::Tensor;
using fast_call::Argument;
using fast_call::wrap;

using TokenLayout = Op<"nccl_ep::token_layout", std::tuple<Tensor, Tensor>(const Tensor&, int64_t, int64_t, int64_t)>;
using Dispatch = Op<"nccl_ep::ht_dispatch_deepep",
                    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
                        const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                        int64_t, int64_t, int64_t, int64_t)>;
using Cached = Op<"nccl_ep::ht_dispatch_cached",
                  torch_ops::HtCached(const Tensor&, at::TensorList, const OptionalTensor&, const Tensor&,
                                      const Tensor&, int64_t, int64_t, at::IntArrayRef)>;
constexpr int64_t kExactSizes = -1;  // the op's capacity

// x, or the pair of it and its scales [T, S].
struct Payload {
  Argument<Tensor> rows;
  Argument<OptionalTensor> scales;

  bool load(PyObject* given) {
    if (THPVariable_CheckExact(given)) return rows.load(given) && rows.get().dim() == 2;
    if ((!PyTuple_CheckExact(given) && !PyList_CheckExact(given)) || PySequence_Fast_GET_SIZE(given) != 2) return false;
    return rows.load(PySequence_Fast_GET_ITEM(given, 0)) && scales.load(PySequence_Fast_GET_ITEM(given, 1)) &&
           rows.get().dim() == 2 && scales.get() && scales.get()->dim() == 2;
  }
  bool is_plain(const Tensor& seq) const {
    return !wants_gradient(rows, scales) && is_beside(seq, rows.get()) && is_beside(seq, scales.get());
  }
  int64_t row_bytes() const {
    const int64_t scale_bytes = scales.get() ? scales.get()->size(1) * scales.get()->element_size() : 0;
    return normal_row_bytes(rows.get().size(1), rows.get().element_size(), scale_bytes);
  }
  PyObject* as_given(Tensor&& moved, Tensor&& moved_scales) const {
    if (!scales.get()) return wrap(std::move(moved));
    return tuple_of(wrap(std::move(moved)), wrap(std::move(moved_scales)));
  }
};

// Tokens for which the window has room, of those that were asked for before; 0: of others.
int64_t tokens_that_fit(PyObject* fitting, int64_t num_experts, int64_t topk, int64_t row_bytes) {
  if (!PyDict_CheckExact(fitting)) return 0;
  const auto key = py::reinterpret_steal<py::object>(tuple_of(number(num_experts), number(topk), number(row_bytes)));
  PyObject* found = key ? PyDict_GetItemWithError(fitting, key.ptr()) : nullptr;
  int64_t tokens = 0;
  if (found == nullptr) PyErr_Clear();
  return is_number(found, tokens) ? tokens : 0;
}

bool is_one_domain(const Tensor& seq) { return seq.dim() == 4 && seq.size(1) == seq.size(2); }

bool is_of(const Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes) {
  return tensor.scalar_type() == dtype && tensor.sizes() == sizes;
}

// ---- get_dispatch_layout: seq, topk_idx, num_experts

PyObject* get_dispatch_layout(PyObject* const* given, Py_ssize_t count) {
  Argument<Tensor> seq, topk_idx;
  Argument<int64_t> num_experts;
  if (count != 3 || !is_plain_thread() || !seq.load(given[0]) || !topk_idx.load(given[1]) ||
      !num_experts.load(given[2]) || !is_one_domain(seq.get()) || !is_beside(seq.get(), topk_idx.get())) {
    Py_RETURN_NONE;
  }
  const Tensor& ids = topk_idx.get();
  const int64_t num_ranks = seq.get().size(1);
  const bool is_idx = ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt;
  if (ids.dim() != 2 || !is_idx || num_experts.get() < 1 || num_experts.get() > INT32_MAX ||
      num_experts.get() % num_ranks != 0) {
    Py_RETURN_NONE;
  }
  auto [counts, is_in_rank] = TokenLayout::run(ids, num_ranks, 1, num_experts.get());
  return tuple_of(wrap(part_of(counts, 0, {num_ranks})), new_reference(Py_None),
                  wrap(part_of(counts, num_ranks, {num_experts.get()})), wrap(std::move(is_in_rank)), no_event());
}

// ---- dispatch

// What the caller says of the routing is that of topk_idx. Asked on the CPU alone: it would wait for a GPU.
bool is_layout_of(const Tensor& topk_idx, const Tensor& is_in_rank, int64_t num_ranks, int64_t num_experts) {
  if (!topk_idx.is_cpu()) return true;
  const Tensor made = std::get<1>(TokenLayout::run(topk_idx, num_ranks, 1, num_experts));
  const at::AutoDispatchBelowAutograd below;
  return at::equal(made, is_in_rank);
}

// seq, fitting, x, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
// expert_alignment, num_worst_tokens, num_sms. A number in place of the results: so many tokens of a rank are to be
// sent, and the window has no room for them. All ranks see that, and nothing was sent.
PyObject* normal_dispatch(PyObject* const* given, Py_ssize_t count) {
  Argument<Tensor> seq_argument, per_rank, in_rank, per_expert, topk_idx, topk_weights;
  Argument<int64_t> alignment, worst, num_sms;
  Payload payload;
  if (count != 11 || !is_plain_thread() || !seq_argument.load(given[0]) || !payload.load(given[2]) ||
      !per_rank.load(given[3]) || !in_rank.load(given[4]) || !per_expert.load(given[5]) || !topk_idx.load(given[6]) ||
      !topk_weights.load(given[7]) || !alignment.load(given[8]) || !worst.load(given[9]) || !num_sms.load(given[10])) {
    Py_RETURN_NONE;
  }
  const Tensor &seq = seq_argument.get(), &ids = topk_idx.get();
  if (!is_one_domain(seq) || !payload.is_plain(seq) || wants_gradient(topk_weights)) Py_RETURN_NONE;
  for (const Tensor* each : {&per_rank.get(), &in_rank.get(), &per_expert.get(), &ids, &topk_weights.get()}) {
    if (!is_beside(seq, *each)) Py_RETURN_NONE;
  }
  const int64_t num_ranks = seq.size(1), num_tokens = payload.rows.get().size(0);
  const int64_t num_experts = per_expert.get().dim() == 1 ? per_expert.get().size(0) : 0;
  const bool is_idx = ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt;
  if (ids.dim() != 2 || !is_idx || num_experts < 1 || num_experts % num_ranks != 0 || alignment.get() < 1 ||
      alignment.get() > INT32_MAX || worst.get() < 0 || worst.get() > INT32_MAX ||
      !is_of(per_rank.get(), at::kInt, {num_ranks}) || !is_of(in_rank.get(), at::kBool, {num_tokens, num_ranks}) ||
      !is_of(per_expert.get(), at::kInt, {num_experts})) {
    Py_RETURN_NONE;
  }
  const int64_t topk = ids.size(1);
  const int64_t max_tokens = tokens_that_fit(given[1], num_experts, topk, payload.row_bytes());
  const bool is_exact = worst.get() == 0;
  if (max_tokens == 0 || (!is_exact && (num_tokens > max_tokens || worst.get() > num_ranks * max_tokens))) {
    Py_RETURN_NONE;
  }
  if (ids.size(0) != num_tokens || !is_layout_of(ids, in_rank.get(), num_ranks, num_experts)) Py_RETURN_NONE;
  const GraphOutputsScope in_arena;
  auto [rows, scales, recv_ids, weights, info, route, slots, rank_prefix, counts] =
      Dispatch::run(seq, payload.rows.get(), payload.scales.get(), ids, topk_weights.get(), num_experts, max_tokens,
                    is_exact ? kExactSizes : worst.get(), num_sms.get());
  const int64_t* host_counts = is_exact ? counts.data_ptr<int64_t>() : nullptr;
  if (is_exact && host_counts[0] > max_tokens) return number(host_counts[0]);
  const int64_t num_local = is_exact ? counts.size(0) - 1 : 0;
  const auto list = py::reinterpret_steal<py::object>(PyList_New(num_local));
  if (!list) return nullptr;
  for (int64_t e = 0; e < num_local; e++) {
    PyObject* aligned = number(align_up(host_counts[1 + e], alignment.get()));
    if (aligned == nullptr) return nullptr;
    PyList_SET_ITEM(list.ptr(), e, aligned);
  }
  const OutputShape shape = OutputShape::make(Shape::make(static_cast<int>(num_ranks), static_cast<int>(num_experts),
                                                          static_cast<int>(topk), static_cast<int>(max_tokens)),
                                              OutputLayout::kFlat, 1, 1);
  const auto parts = HtHandleShape::make(
      shape, Topology::make(static_cast<int>(num_ranks), static_cast<int>(num_ranks)), static_cast<int>(num_tokens), 0);
  const Tensor src_idx = part_of(slots, 0, {rows.size(0)});
  const Tensor head = part_of(route, parts.slots_at(), {num_tokens, topk});
  const Tensor numbers = new_tensor({0, num_experts, max_tokens}, at::kInt, seq.device());
  PyObject* handle = tuple_of(wrap(std::move(rank_prefix)), wrap(std::move(route)), wrap(Tensor(numbers)),
                              wrap(Tensor(src_idx)), new_reference(given[4]), wrap(Tensor(head)));
  return tuple_of(payload.as_given(std::move(rows), std::move(scales)), wrap(std::move(recv_ids)),
                  wrap(std::move(weights)), new_reference(list), handle, no_event());
}

// ---- What takes a handle

struct Route {
  const Tensor* route = nullptr;
  Tensor slots;
  int64_t topk = 0, num_experts = 0, max_tokens = 0, num_tokens = 0, num_rows = 0;

  // False: it is not plain, or `row_bytes` were not asked for before.
  bool load(PyObject* handle, const Tensor& seq, PyObject* fitting, int64_t row_bytes) {
    if ((!PyTuple_CheckExact(handle) && !PyList_CheckExact(handle)) || PySequence_Fast_GET_SIZE(handle) != 6) {
      return false;
    }
    const Tensor* tensors[6];
    for (Py_ssize_t i = 0; i < 6; i++) {
      tensors[i] = fast_call::plain_tensor(PySequence_Fast_GET_ITEM(handle, i));
      if (tensors[i] == nullptr || !is_beside(seq, *tensors[i])) return false;
    }
    const Tensor &numbers = *tensors[2], &src_idx = *tensors[3], &is_in_rank = *tensors[4], &head = *tensors[5];
    if (numbers.dim() != 3 || src_idx.dim() != 1 || is_in_rank.dim() != 2 || head.dim() != 2) return false;
    route = tensors[1];
    topk = head.size(1);
    num_experts = numbers.size(1);
    num_tokens = is_in_rank.size(0);
    num_rows = src_idx.size(0);
    max_tokens = std::min(numbers.size(2), tokens_that_fit(fitting, num_experts, topk, row_bytes));
    if (max_tokens < std::max<int64_t>(num_tokens, 1) || !src_idx.is_contiguous()) return false;
    slots = part_of(src_idx, 0, {std::min(num_rows, seq.size(1) * max_tokens), 1});
    return true;
  }
};

// seq, fitting, x, handle, num_sms.
PyObject* normal_dispatch_cached(PyObject* const* given, Py_ssize_t count) {
  Argument<Tensor> seq_argument;
  Argument<int64_t> num_sms;
  Payload payload;
  Route route;
  if (count != 5 || !is_plain_thread() || !seq_argument.load(given[0]) || !payload.load(given[2]) ||
      !num_sms.load(given[4])) {
    Py_RETURN_NONE;
  }
  const Tensor& seq = seq_argument.get();
  if (!is_one_domain(seq) || !payload.is_plain(seq) || !route.load(given[3], seq, given[1], payload.row_bytes())) {
    Py_RETURN_NONE;
  }
  const DispatchConfig config{{route.num_experts, route.topk, route.max_tokens, OutputLayout::kFlat},
                              {.num_sms = to_int(num_sms.get(), "num_sms")}};
  const GraphOutputsScope in_arena;
  auto [rows, scales, x1, x2, x3] = Cached::run(seq, payload.rows.get(), payload.scales.get(), *route.route,
                                                route.slots, route.num_tokens, route.num_rows, config.pack());
  PyObject* moved = payload.as_given(std::move(rows), std::move(scales));
  return tuple_of(moved, new_reference(Py_None), new_reference(Py_None), new_reference(Py_None), new_reference(Py_None),
                  no_event());
}

Tensor combine_rows(const Tensor& seq, const Tensor& rows, const Route& route, at::TensorList biases, int64_t num_sms) {
  const DType dtype = dtype_of(rows.scalar_type());
  const CombineConfig config{{route.num_experts, route.topk, route.max_tokens, OutputLayout::kFlat},
                             {.out_dtype = dtype, .wire_dtype = dtype, .num_sms = to_int(num_sms, "num_sms")}};
  return std::get<0>(HtCombine::run(seq, rows, std::nullopt, *route.route, route.slots, std::nullopt, std::nullopt,
                                    biases, route.num_tokens, route.num_rows, config.pack()));
}

// seq, fitting, x, handle, topk_weights, num_sms.
PyObject* normal_combine(PyObject* const* given, Py_ssize_t count) {
  Argument<Tensor> seq_argument, x;
  Argument<OptionalTensor> weights;
  Argument<int64_t> num_sms;
  Route route, of_weights;
  if (count != 6 || !is_plain_thread() || !seq_argument.load(given[0]) || !x.load(given[2]) ||
      !weights.load(given[4]) || !num_sms.load(given[5])) {
    Py_RETURN_NONE;
  }
  const Tensor &seq = seq_argument.get(), &rows = x.get();
  if (!is_one_domain(seq) || wants_gradient(x, weights) || !is_beside(seq, rows) || !is_beside(seq, weights.get()) ||
      rows.dim() != 2 || !route.load(given[3], seq, given[1], rows.size(1) * rows.element_size()) ||
      rows.size(0) != route.num_rows) {
    Py_RETURN_NONE;
  }
  if (weights.get()) {  // rows of their own, as they are where they are rows of 16 bytes
    const Tensor& each = *weights.get();
    if (!is_of(each, at::kFloat, {route.num_rows, route.topk}) || route.topk % 4 != 0 || !each.is_contiguous() ||
        !of_weights.load(given[3], seq, given[1], 4 * route.topk)) {
      Py_RETURN_NONE;
    }
  }
  Tensor combined = combine_rows(seq, rows, route, {}, num_sms.get());
  PyObject* combined_weights = new_reference(Py_None);
  if (weights.get()) {
    Py_DECREF(combined_weights);
    combined_weights = wrap(combine_rows(seq, *weights.get(), of_weights, {}, num_sms.get()));
  }
  return tuple_of(wrap(std::move(combined)), combined_weights, no_event());
}

// call: for the long way.
PyObject* call_with_graph_outputs(PyObject* const* given, Py_ssize_t count) {
  TORCH_CHECK_TYPE(count == 1, count, " arguments, not what to call");
  const GraphOutputsScope in_arena;
  return PyObject_CallNoArgs(given[0]);
}

PyMethodDef methods[] = {
    method<&get_dispatch_layout>("get_dispatch_layout_eager"), method<&normal_dispatch>("normal_dispatch_eager"),
    method<&normal_dispatch_cached>("normal_dispatch_cached_eager"), method<&normal_combine>("normal_combine_eager"),
    method<&call_with_graph_outputs>("call_with_graph_outputs")};
const Added added(methods);

}  // namespace
}  // namespace ep::eager
