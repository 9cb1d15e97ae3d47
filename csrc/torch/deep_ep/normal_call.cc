// The methods of DeepEP's normal mode (nccl_ep/deep_ep/v1/normal.py), each on the current stream. Their first argument
// is the method's object, which says what is wrong where an argument is not at once what it must be.
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <utility>

#include "base/math.h"
#include "layout/ht/handle.h"
#include "runtime/call.h"
#include "torch/call/given.h"
#include "torch/call/hand_over.h"
#include "torch/call/types.h"
#include "torch/deep_ep/op_types.h"
#include "torch/ops/arena_pool.h"
#include "torch/ops/arguments.h"

namespace ep::call {
namespace {

using at::Tensor;

// A tensor of the entries of `whole` from `first` on, in the same memory and no view of it: as new_tensors() makes
// them.
Tensor part_of(const Tensor& whole, int64_t first, at::IntArrayRef sizes) {
  const c10::DispatchKeySet key(whole.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  Tensor part = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(whole.storage()), key, whole.dtype());
  part.unsafeGetTensorImpl()->set_storage_offset(whole.storage_offset() + first);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return part;
}

// Of a row on its way there with its scales, or home in bf16.
int64_t row_bytes_of(int64_t hidden, int64_t element_bytes, int64_t scale_bytes) {
  return std::max(hidden * element_bytes + (scale_bytes + 15) / 16 * 16, 2 * hidden);
}

bool is_of(const Tensor& tensor, at::ScalarType dtype, at::IntArrayRef sizes) {
  return tensor.scalar_type() == dtype && tensor.sizes() == sizes;
}
bool is_idx(const Tensor& ids) {
  return ids.dim() == 2 && (ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt);
}

// ---- What every method begins with

struct Place {
  PyObject* view;
  const Tensor& seq;  // of the window that serves now
  int64_t num_ranks, domain_size;

  // view, seq.
  explicit Place(PyObject* const* given)
      : view(given[0]), seq(tensor_of(given[1])), num_ranks(seq.size(1)), domain_size(seq.size(2)) {}
  bool is_one_domain() const { return domain_size == num_ranks; }
  py::object ask(const char* method, const auto&... args) const { return py::handle(view).attr(method)(args...); }

  // Tokens for which the window has room: the max_tokens of a call, the same on all ranks.
  int64_t tokens_that_fit(int64_t num_experts, int64_t topk, int64_t row_bytes) const {
    static PyObject* const name = PyUnicode_InternFromString("_fitting");
    const py::object fitting = taken(PyObject_GetAttr(view, name));
    const py::object key = taken(tuple_of(number(num_experts), number(topk), number(row_bytes)));
    PyObject* found = PyDict_CheckExact(fitting.ptr()) ? PyDict_GetItemWithError(fitting.ptr(), key.ptr()) : nullptr;
    if (found != nullptr) return load_integer("tokens", found);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return ask("_max_tokens", num_experts, topk, row_bytes).cast<int64_t>();
  }
};

// x, or the pair of it and its scales [T, S] or [T].
class Payload {
 public:
  Payload(const Place& place, PyObject* given) {
    const bool is_pair = (PyTuple_Check(given) || PyList_Check(given)) && PySequence_Fast_GET_SIZE(given) == 2;
    PyObject* const x = is_pair ? PySequence_Fast_GET_ITEM(given, 0) : given;
    PyObject* const scales_given = is_pair ? PySequence_Fast_GET_ITEM(given, 1) : Py_None;
    is_plain = rows_.load(x, place.seq);
    is_plain = scales_.load(scales_given, place.seq) && is_plain;
    if (!is_plain || !rows_ || rows_->dim() != 2) {
      py::module_::import("nccl_ep.deep_ep.v1.handle")
          .attr("require_payload")(py::handle(place.view), py::handle(given));
    }
    if (scales_) scales = scales_->dim() == 1 ? scales_->unsqueeze(1) : *scales_;
  }
  const Tensor& rows() const { return *rows_; }
  int64_t num_tokens() const { return rows_->size(0); }
  int64_t row_bytes() const {
    const int64_t scale_bytes = scales ? scales->size(-1) * static_cast<int64_t>(scales->element_size()) : 0;
    return row_bytes_of(rows_->size(1), static_cast<int64_t>(rows_->element_size()), scale_bytes);
  }
  PyObject* as_given(Tensor&& moved, Tensor&& moved_scales) const {
    if (!scales) return wrap(std::move(moved));
    return tuple_of(wrap(std::move(moved)),
                    wrap(scales_->dim() == 1 ? moved_scales.squeeze(1) : std::move(moved_scales)));
  }

  bool is_plain = false;
  std::optional<Tensor> scales;  // [T, S]

 private:
  GivenTensor rows_, scales_;
};

// ---- get_dispatch_layout: view, seq, topk_idx, num_experts

PyObject* get_dispatch_layout(PyObject* const* given, Py_ssize_t count) {
  require_count(count, 4);
  const Place place(given);
  GivenTensor ids;
  const bool is_plain = load_all(place.seq, {{"topk_idx", given[2], ids}}) && is_plain_thread();
  if (!is_idx(*ids)) place.ask("_check_idx", *ids);
  const int64_t num_experts = to_int(load_integer("num_experts", given[3]), "num_experts");
  EP_CHECK(num_experts >= 1 && num_experts % place.num_ranks == 0, num_experts, " experts do not divide over ",
           place.num_ranks, " ranks");
  const int64_t num_domains = place.num_ranks / place.domain_size, domains = num_domains > 1 ? num_domains : 0;
  auto [counts, is_in_rank] =
      call_op(torch_ops::token_layout(), is_plain, *ids, place.num_ranks, num_domains, num_experts);
  PyObject* per_domain = domains > 0 ? wrap(part_of(counts, place.num_ranks, {domains})) : new_reference(Py_None);
  return tuple_of(wrap(part_of(counts, 0, {place.num_ranks})), per_domain,
                  wrap(part_of(counts, place.num_ranks + domains, {num_experts})), wrap(std::move(is_in_rank)),
                  no_event());
}

// ---- dispatch

// expert_alignment and num_worst_tokens.
struct Sizes {
  int64_t alignment, worst;

  explicit Sizes(PyObject* const* given)
      : alignment(to_int(load_integer("expert_alignment", given[0]), "expert_alignment")),
        worst(to_int(load_integer("num_worst_tokens", given[1]), "num_worst_tokens")) {
    EP_CHECK(alignment >= 1, "expert_alignment is ", alignment, ", must be at least 1");
    EP_CHECK(worst >= 0, "num_worst_tokens is ", worst, ": not negative, and with topk_idx only");
  }
};

// What the caller says of a routing, and the routing.
struct Routing {
  GivenTensor per_rank, in_rank, per_expert, topk_idx, topk_weights;
  int64_t num_experts = 0;
  bool is_plain = false;

  Routing(const Place& place, PyObject* const* given, int64_t num_tokens) {
    const Tensor& seq = place.seq;
    const auto object = [&](size_t i) { return py::handle(given[i]); };
    EP_CHECK(given[0] != Py_None && given[1] != Py_None && given[2] != Py_None,
             "num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert must be given without a handle: "
             "get_dispatch_layout returns them");
    is_plain = per_rank.load(given[0], seq);
    is_plain = in_rank.load(given[1], seq) && is_plain;
    is_plain = per_expert.load(given[2], seq) && is_plain;
    if (is_plain) num_experts = per_expert->dim() == 1 ? per_expert->size(0) : 0;
    if (!is_plain || num_experts < 1 || num_experts % place.num_ranks != 0 ||
        !is_of(*per_rank, at::kInt, {place.num_ranks}) || !is_of(*in_rank, at::kBool, {num_tokens, place.num_ranks}) ||
        !is_of(*per_expert, at::kInt, {num_experts})) {
      num_experts = place.ask("_check_layout", num_tokens, object(0), object(1), object(2)).cast<int64_t>();
    }
    is_plain = topk_idx.load(given[3], seq) && is_plain;
    is_plain = topk_weights.load(given[4], seq) && is_plain;
    if (!is_plain || !topk_idx || !is_idx(*topk_idx) || !is_in_rank_right(place, num_tokens)) {
      place.ask("_check_topk", num_tokens, object(3), object(4), object(1), num_experts);
    }
    is_plain = is_plain && is_plain_thread();
  }

 private:
  // Asked on the CPU alone: it would wait for a GPU.
  bool is_in_rank_right(const Place& place, int64_t num_tokens) const {
    if (!topk_idx->is_cpu() || topk_idx->size(0) != num_tokens) return true;
    const Tensor made = std::get<1>(call_op(torch_ops::token_layout(), true, *topk_idx, place.num_ranks,
                                            place.num_ranks / place.domain_size, num_experts));
    const at::AutoDispatchBelowAutograd below;
    return at::equal(made, *in_rank);
  }
};

// The experts' counts, rounded up.
py::object aligned_counts(const Tensor& counts, bool are_there, int64_t alignment) {
  const int64_t num_local = are_there ? counts.size(0) - 1 : 0;
  const int64_t* host = are_there ? counts.data_ptr<int64_t>() + 1 : nullptr;
  py::object list = taken(PyList_New(num_local));
  for (int64_t e = 0; e < num_local; e++) {
    PyList_SET_ITEM(list.ptr(), e, taken(number(align_up(host[e], alignment))).release().ptr());
  }
  return list;
}

// DeepEP's tensors in its order, for one domain or several.
PyObject* handle_of(const Place& place, const Routing& routing, int64_t max_tokens, Tensor&& rank_prefix,
                    Tensor&& route, const Tensor& slots, int64_t num_rows) {
  const int64_t num_tokens = routing.in_rank->size(0), topk = routing.topk_idx->size(1);
  const auto narrow = [](int64_t value) { return static_cast<int>(value); };
  const OutputShape shape = OutputShape::make(
      Shape::make(narrow(place.num_ranks), narrow(routing.num_experts), narrow(topk), narrow(max_tokens)),
      OutputLayout::kFlat, 1, 1);
  const auto parts = HtHandleShape::make(shape, Topology::make(narrow(place.num_ranks), narrow(place.domain_size)),
                                         narrow(num_tokens), 0);
  const int64_t num_slots = std::min(num_rows, slots.size(0));
  Tensor src_idx = slots.size(1) == 1 ? part_of(slots, 0, {num_slots}) : slots.narrow(0, 0, num_slots).select(1, 0);
  if (num_slots < num_rows) src_idx = at::constant_pad_nd(src_idx, {0, num_rows - num_slots});
  Tensor head = part_of(route, parts.slots_at(), {num_tokens, topk});
  const at::Device device = place.seq.device();
  Tensor numbers = new_tensor({0, routing.num_experts, max_tokens}, at::kInt, device);
  PyObject* in_rank = as_python(*routing.in_rank);
  if (place.is_one_domain()) {
    return tuple_of(wrap(std::move(rank_prefix)), wrap(std::move(route)), wrap(std::move(numbers)),
                    wrap(std::move(src_idx)), in_rank, wrap(std::move(head)));
  }
  const int64_t rank = py::handle(place.view).attr("rank").cast<int64_t>();
  const Tensor here = rank_prefix.select(1, rank).contiguous();
  const Tensor none = new_tensor({0}, at::kInt, device);
  return tuple_of(in_rank, wrap(std::move(route)), wrap(std::move(numbers)), as_python(none),
                  wrap(here.slice(0, place.domain_size - 1, here.size(0), place.domain_size).contiguous()),
                  as_python(none), as_python(here), wrap(std::move(src_idx)), wrap(std::move(head)), as_python(none));
}

// view, seq, x, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
// expert_alignment, num_worst_tokens, num_sms. Returns received rows, ids, weights, the experts' counts, the handle,
// the info tensor and no event. A number in place of these: so many tokens of a rank are to be sent, and the window has
// no room for them. All ranks see that, and nothing was sent.
PyObject* normal_dispatch(PyObject* const* given, Py_ssize_t count) {
  require_count(count, 11);
  const Place place(given);
  const Payload payload(place, given[2]);
  const auto [alignment, worst] = Sizes(given + 8);
  const Routing routing(place, given + 3, payload.num_tokens());
  const int64_t topk = routing.topk_idx->size(1), row_bytes = payload.row_bytes();
  const int64_t max_tokens = place.tokens_that_fit(routing.num_experts, topk, row_bytes);
  const bool is_exact = worst == 0;
  if (!is_exact && payload.num_tokens() > max_tokens) {
    place.ask("_refuse_tokens", payload.num_tokens(), row_bytes, topk, max_tokens);
  }
  const GraphOutputsScope in_arena;
  auto [rows, scales, recv_ids, weights, info, route, slots, rank_prefix, counts] =
      call_op(torch_ops::ht_dispatch_deepep(), payload.is_plain && routing.is_plain, place.seq, payload.rows(),
              payload.scales, *routing.topk_idx, routing.topk_weights.optional(), routing.num_experts, max_tokens,
              is_exact ? kExactCapacity : worst, load_integer("num_sms", given[10]));
  if (const int64_t most = is_exact ? counts.data_ptr<int64_t>()[0] : 0; most > max_tokens) {
    place.ask("_grow_for", most, max_tokens, topk, row_bytes);
    Py_RETURN_NONE;
  }
  const py::object list = aligned_counts(counts, is_exact, alignment);
  PyObject* handle =
      handle_of(place, routing, max_tokens, std::move(rank_prefix), std::move(route), slots, rows.size(0));
  return tuple_of(payload.as_given(std::move(rows), std::move(scales)), wrap(std::move(recv_ids)),
                  wrap(std::move(weights)), new_reference(list), handle, wrap(std::move(info)), no_event());
}

// ---- What takes a handle

struct Route {
  GivenTensor route;
  Tensor src_idx;
  int64_t topk = 0, num_experts = 0, max_tokens = 0, num_tokens = 0, num_rows = 0;
  bool is_plain = true;

  Route(const Place& place, PyObject* handle) {
    const bool is_one = place.is_one_domain();
    const Py_ssize_t size = is_one ? 6 : 10;
    constexpr size_t kOne[] = {1, 2, 3, 4, 5}, kSeveral[] = {1, 2, 7, 0, 8};
    const size_t* const at = is_one ? kOne : kSeveral;
    GivenTensor all[10];
    is_plain = (PyTuple_Check(handle) || PyList_Check(handle)) && PySequence_Fast_GET_SIZE(handle) == size;
    for (Py_ssize_t i = 0; is_plain && i < size; i++) {
      is_plain = all[i].load(PySequence_Fast_GET_ITEM(handle, i), place.seq) && all[i];
    }
    if (!is_plain || !are_right(all, at)) {
      py::module_::import("nccl_ep.deep_ep.v1.handle")
          .attr("require_route")(py::handle(place.view), py::handle(handle));
      for (Py_ssize_t i = 0; i < size; i++) all[i].load(PySequence_Fast_GET_ITEM(handle, i), place.seq);
    }
    route.load(PySequence_Fast_GET_ITEM(handle, static_cast<Py_ssize_t>(at[0])), place.seq);
    const Tensor &numbers = *all[at[1]], &is_in_rank = *all[at[3]], &head = *all[at[4]];
    src_idx = *all[at[2]];
    topk = head.size(1);
    num_experts = numbers.size(1);
    max_tokens = numbers.size(2);
    num_tokens = is_in_rank.size(0);
    num_rows = src_idx.size(0);
  }

  // Tokens of a call whose rows have so many bytes.
  int64_t tokens_for(const Place& place, int64_t row_bytes) const {
    if (!place.is_one_domain()) return max_tokens;  // a size of the route
    const int64_t tokens = std::min(max_tokens, place.tokens_that_fit(num_experts, topk, row_bytes));
    if (tokens < std::max<int64_t>(num_tokens, 1)) {
      raise(ErrorKind::kInvalidArgument, "rows of ", row_bytes, " bytes for ", num_tokens,
            " tokens, but the window of ", py::handle(place.view).attr("name").cast<std::string>(), " has room for ",
            tokens, " of them: those of the dispatch were narrower, so that it did not grow for these");
    }
    return tokens;
  }
  Tensor slots_for(const Place& place, int64_t tokens) const {
    const int64_t count = std::min(num_rows, place.num_ranks * tokens);
    if (is_plain && src_idx.is_contiguous()) return part_of(src_idx, 0, {count, 1});
    return src_idx.narrow(0, 0, count).contiguous().view({-1, 1});
  }

 private:
  static bool are_right(const GivenTensor* all, const size_t* at) {
    return all[at[1]]->dim() == 3 && all[at[2]]->dim() == 1 && all[at[3]]->dim() == 2 && all[at[4]]->dim() == 2;
  }
};

// view, seq, x, handle, expert_alignment, num_worst_tokens, num_sms.
PyObject* normal_dispatch_cached(PyObject* const* given, Py_ssize_t count) {
  require_count(count, 7);
  const Place place(given);
  const Payload payload(place, given[2]);
  Sizes(given + 4);  // they change nothing here
  const Route route(place, given[3]);
  const int64_t tokens = route.tokens_for(place, payload.row_bytes());
  const DispatchConfig config{{route.num_experts, route.topk, tokens, OutputLayout::kFlat},
                              {.num_sms = to_int(load_integer("num_sms", given[6]), "num_sms")}};
  const GraphOutputsScope in_arena;
  const bool is_plain = payload.is_plain && route.is_plain && is_plain_thread();
  auto [rows, scales, x1, x2, x3] =
      call_op(torch_ops::ht_dispatch_cached(), is_plain, place.seq, payload.rows(), payload.scales, *route.route,
              route.slots_for(place, tokens), route.num_tokens, route.num_rows, config.pack());
  PyObject* moved = payload.as_given(std::move(rows), std::move(scales));
  return tuple_of(moved, new_reference(Py_None), new_reference(Py_None), new_reference(Py_None), new_reference(Py_None),
                  no_event());
}

Tensor combine_rows(const Place& place, const Route& route, const Tensor& rows, at::TensorList biases, int64_t num_sms,
                    bool is_plain) {
  const int64_t tokens = route.tokens_for(place, rows.size(1) * static_cast<int64_t>(rows.element_size()));
  const DType dtype = dtype_of(rows.scalar_type());
  const CombineConfig config{{route.num_experts, route.topk, tokens, OutputLayout::kFlat},
                             {.out_dtype = dtype, .wire_dtype = dtype, .num_sms = to_int(num_sms, "num_sms")}};
  return std::get<0>(call_op(torch_ops::ht_combine(), is_plain, place.seq, rows, std::nullopt, *route.route,
                             route.slots_for(place, tokens), std::nullopt, std::nullopt, biases, route.num_tokens,
                             route.num_rows, config.pack()));
}

// Rows of their own, which are multiples of 16 bytes: a combine of scalars would take those of the experts' owners
// only.
Tensor combine_weights(const Place& place, const Route& route, const Tensor& weights, int64_t num_sms, bool is_plain) {
  const int64_t missing = align_up<int64_t>(route.topk, 4) - route.topk;
  const Tensor padded = missing == 0 ? weights.contiguous() : at::constant_pad_nd(weights, {0, missing}).contiguous();
  Tensor combined = combine_rows(place, route, padded, {}, num_sms, is_plain);
  return missing == 0 ? combined : combined.narrow(1, 0, route.topk).contiguous();
}

// view, seq, x, handle, topk_weights, biases, num_sms.
PyObject* normal_combine(PyObject* const* given, Py_ssize_t count) {
  require_count(count, 7);
  const Place place(given);
  const Route route(place, given[3]);
  GivenTensor x, weights;
  bool is_plain = load_all(place.seq, {{"x", given[2], x, true}, {"topk_weights", given[4], weights, true}});
  std::vector<Tensor> biases;
  if (!load_tensors(given[5], place.seq, biases)) {
    check_in_python("require_biases", place.seq, py::handle(given[5]));
    is_plain = false;
  }
  is_plain = is_plain && route.is_plain && is_plain_thread();
  EP_CHECK(x, "x has shape None, must be [", route.num_rows, ", hidden] for the rows of the handle");
  EP_CHECK(x->dim() == 2 && x->size(0) == route.num_rows, "x has shape ", x->sizes(), ", must be [", route.num_rows,
           ", hidden] for the rows of the handle");
  if (weights && !is_of(*weights, at::kFloat, {route.num_rows, route.topk})) {
    raise(ErrorKind::kInvalidArgument, "topk_weights is ", repr(taken(as_python(weights->scalar_type())).ptr()), " ",
          weights->sizes(), ", must be torch.float32 [", route.num_rows, ", ", route.topk, "]");
  }
  const int64_t num_sms = load_integer("num_sms", given[6]);
  Tensor combined = combine_rows(place, route, *x, biases, num_sms, is_plain);
  PyObject* combined_weights =
      weights ? wrap(combine_weights(place, route, *weights, num_sms, is_plain)) : new_reference(Py_None);
  return tuple_of(wrap(std::move(combined)), combined_weights, no_event());
}

PyMethodDef normal_calls[] = {
    method<&get_dispatch_layout>("get_dispatch_layout"), method<&normal_dispatch>("normal_dispatch"),
    method<&normal_dispatch_cached>("normal_dispatch_cached"), method<&normal_combine>("normal_combine")};
const Added added_normal(normal_calls);

}  // namespace
}  // namespace ep::call
