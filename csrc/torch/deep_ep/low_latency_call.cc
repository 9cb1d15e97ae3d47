// DeepEP's low-latency methods (nccl_ep/deep_ep/v1/low_latency.py).
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

#include "torch/call/buffer_state.h"
#include "torch/call/given.h"
#include "torch/call/hand_over.h"
#include "torch/call/stream_event.h"
#include "torch/call/types.h"
#include "torch/deep_ep/op_types.h"
#include "torch/ops/arguments.h"

namespace ep::call {
namespace {

using at::Tensor;

struct How {
  bool is_async, has_hook;

  static How of(PyObject* async_finish, PyObject* return_recv_hook) {
    const How how{load_bool("async_finish", async_finish), load_bool("return_recv_hook", return_recv_hook)};
    EP_CHECK(!how.is_async || !how.has_hook,
             "async_finish and return_recv_hook are both set: a hook leaves nothing to wait for");
    return how;
  }
  // Where the operation runs.
  CommStream stream(BufferState& buffer, PyObject* view) const {
    return {is_async ? buffer.comm_stream_of(view) : Py_None, buffer.tensor().device()};
  }
};

BufferState& buffer_of(PyObject* view) {
  BufferState* found = BufferState::of<"_view_call">(view);
  TORCH_CHECK_TYPE(found != nullptr, "a ", Py_TYPE(view)->tp_name, " is no view of a buffer");
  return *found;
}

Quant quant_of(PyObject* use_fp8, PyObject* round_scale, PyObject* use_ue8m0) {
  const bool quantises = load_bool("use_fp8", use_fp8), is_rounded = load_bool("round_scale", round_scale);
  const bool has_exponents = load_bool("use_ue8m0", use_ue8m0);
  EP_CHECK(!quantises || !has_exponents || is_rounded,
           "use_ue8m0 is set, and round_scale is not: exponents stand for scales that are powers of two");
  return !quantises ? Quant::kNone : has_exponents ? Quant::kFp8Ue8m0 : is_rounded ? Quant::kFp8Rounded : Quant::kFp8;
}

// ---- dispatch

// self, x, topk_idx, max_tokens, num_experts, recv_stats, wait_cost, use_fp8, round_scale, use_ue8m0, async_finish,
// return_recv_hook, x_scales. Returns received rows (with their scales if there are any), counts, the handle, the
// event, and what receives them when it is called, or None.
PyObject* low_latency_dispatch(PyObject* const* given, Py_ssize_t count) {
  require_count(count, 13);
  BufferState& buffer = buffer_of(given[0]);
  const Tensor& seq = buffer.tensor();
  const How how = How::of(given[10], given[11]);
  const auto quant = static_cast<int64_t>(quant_of(given[7], given[8], given[9]));
  GivenTensor x, topk_idx, recv_stats, wait_cost, x_scales;
  const bool are_plain = load_all(seq, {{"x", given[1], x},
                                        {"topk_idx", given[2], topk_idx},
                                        {"cumulative_local_expert_recv_stats", given[5], recv_stats, true},
                                        {"dispatch_wait_recv_cost_stats", given[6], wait_cost, true},
                                        {"x_scales", given[12], x_scales, true}});
  const int64_t max_tokens = load_integer("num_max_dispatch_tokens_per_rank", given[3]);
  const int64_t num_experts = load_integer("num_experts", given[4]);
  buffer.receive_lost("dispatch");
  // Split calls have no gradient: what torch says of that is torch's to say.
  const bool is_plain = are_plain && is_plain_thread() && !(how.has_hook && gradients::wants_any(*x));
  const CommStream stream = how.stream(buffer, given[0]);
  auto [rows, scales, weights, counts, src_info, layout_range] = stream.run([&] {
    const auto& op = how.has_hook ? torch_ops::ll_dispatch_deepep_send() : torch_ops::ll_dispatch_deepep();
    return call_op(op, is_plain, seq, *x, x_scales.optional(), *topk_idx, num_experts, max_tokens, quant,
                   recv_stats.optional(), wait_cost.optional(), 0);
  });
  py::object receive = py::none();
  if (how.has_hook) {
    receive = taken(new_pending_call([are_plain, seq, rows, scales, weights, counts, src_info, layout_range,
                                      dtype = x->scalar_type(), num_tokens = x->size(0), topk = topk_idx->size(1),
                                      is_idx64 = topk_idx->scalar_type() == at::kLong, num_experts, max_tokens, quant,
                                      stats = std::optional<Tensor>(recv_stats.optional()),
                                      waits = std::optional<Tensor>(wait_cost.optional())] {
      call_op(torch_ops::ll_dispatch_deepep_recv(), are_plain && is_plain_thread(), seq, rows, scales, weights, counts,
              src_info, layout_range, dtype, num_tokens, topk, is_idx64, num_experts, max_tokens, quant, stats, waits,
              0);
    }));
  }
  const bool has_scales = quant != 0 || x_scales;
  const py::object rows_object = taken(wrap(std::move(rows))), counts_object = taken(wrap(std::move(counts)));
  const py::object scales_object = has_scales ? taken(wrap(std::move(scales))) : py::none();
  const py::object source_object = taken(wrap(std::move(src_info)));
  const py::object range_object = taken(wrap(std::move(layout_range)));
  const py::object event =
      taken(stream.overlap({given[1], given[2], given[5], given[6], given[12], rows_object.ptr(), scales_object.ptr(),
                            counts_object.ptr(), source_object.ptr(), range_object.ptr()}));
  PyObject* received =
      has_scales ? tuple_of(new_reference(rows_object), new_reference(scales_object)) : new_reference(rows_object);
  PyObject* handle = tuple_of(new_reference(source_object), new_reference(range_object), new_reference(given[3]),
                              as_python(x->sym_size(1)), new_reference(given[4]));
  return tuple_of(received, new_reference(counts_object), handle, new_reference(event), new_reference(receive));
}

// ---- combine

// DeepEP's tuple, which stays what it is, whatever other threads do while the operation runs.
class GivenHandle {
 public:
  explicit GivenHandle(PyObject* given) {
    const bool is_sequence = PyTuple_Check(given) || PyList_Check(given);
    if (!is_sequence || PySequence_Size(given) != 5) {
      py::module_::import("nccl_ep.deep_ep.v1.low_latency_memory").attr("elements_of")(py::handle(given));
    }
    elements_ = taken(PySequence_Tuple(given));
    max_tokens = load_integer("handle[2]", at(2));
    hidden = load_integer("handle[3]", at(3));
    num_experts = load_integer("handle[4]", at(4));
  }
  PyObject* source() const { return at(0); }
  const py::object& elements() const { return elements_; }

  int64_t max_tokens, hidden, num_experts;

 private:
  PyObject* at(Py_ssize_t i) const { return PyTuple_GET_ITEM(elements_.ptr(), i); }
  py::object elements_;
};

py::object state_of(PyObject* view) {
  static PyObject* const name = PyUnicode_InternFromString("_state");
  return taken(PyObject_GetAttr(view, name));
}

// The handle of a dispatch whose hook has not run says so.
void require_received(PyObject* view, const py::object& state, const Tensor& src_info) {
  static PyObject* const name = PyUnicode_InternFromString("unreceived");
  const py::object unreceived = taken(PyObject_GetAttr(state.ptr(), name));
  if (unreceived.is_none() || tensor_of(unreceived.ptr()).data_ptr() != src_info.data_ptr()) return;
  py::handle(view).attr("require_usable")();
  raise(ErrorKind::kInvalidUsage, "the dispatch of this handle was sent and has not been received: call its hook");
}

// The tensor that get_next_low_latency_combine_buffer has made. Null: it has not.
py::object made_before(const py::object& state, const GivenHandle& handle) {
  static PyObject* const name = PyUnicode_InternFromString("scratch");
  static PyObject* const kind = PyUnicode_InternFromString("combine");
  const py::object scratch = attribute(state.ptr(), name);
  if (!scratch || !PyDict_CheckExact(scratch.ptr())) return {};
  const auto key = taken(
      tuple_of(new_reference(kind), number(handle.max_tokens), number(handle.hidden), number(handle.num_experts)));
  PyObject* found = PyDict_GetItemWithError(scratch.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found == nullptr ? py::object() : py::reinterpret_borrow<py::object>(found);
}

// What a combine reads with zero_copy, whose shape and type x has.
py::object rows_of_zero_copy(PyObject* view, const py::object& state, const GivenHandle& handle, const Tensor& x) {
  py::object rows = made_before(state, handle);
  if (!rows) rows = py::handle(view).attr("get_next_low_latency_combine_buffer")(handle.elements());
  const Tensor& made = tensor_of(rows.ptr());
  if (x.sizes() != made.sizes() || x.scalar_type() != made.scalar_type() || !x.is_contiguous()) {
    const auto name = [](const Tensor& each) { return repr(taken(as_python(each.scalar_type())).ptr()); };
    raise(ErrorKind::kInvalidArgument, "x is ", name(x), " ", x.sizes(), " of strides ", x.strides(),
          ", with zero_copy it must be as ", name(made), " ", made.sizes(), ", contiguous");
  }
  return rows;
}

// self, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out, wait_cost,
// row_signals, rows_per_signal, signal_threshold, num_sms. Returns the result, the event, and what receives it, or
// None. The last four are for the send.
PyObject* low_latency_combine(PyObject* const* given, Py_ssize_t count) {
  require_count(count, 15);
  PyObject* const view = given[0];
  BufferState& buffer = buffer_of(view);
  const Tensor& seq = buffer.tensor();
  const How how = How::of(given[7], given[8]);
  const bool use_logfmt = load_bool("use_logfmt", given[5]), zero_copy = load_bool("zero_copy", given[6]);
  EP_CHECK(!use_logfmt || !zero_copy, "use_logfmt and zero_copy are both set, and exclude each other");
  const GivenHandle handle(given[4]);
  GivenTensor x, topk_idx, topk_weights, src_info, out, wait_cost, row_signals;
  const bool are_plain = load_all(seq, {{"x", given[1], x},
                                        {"topk_idx", given[2], topk_idx},
                                        {"topk_weights", given[3], topk_weights},
                                        {"handle[0]", handle.source(), src_info},
                                        {"out", given[9], out, true},
                                        {"combine_wait_recv_cost_stats", given[10], wait_cost, true},
                                        {"row_signals", given[11], row_signals, true}});
  const py::object state = state_of(view);
  require_received(view, state, *src_info);
  EP_CHECK(x->dim() == 3 && x->sym_size(2) == handle.hidden, "x has shape ", x->sym_sizes(),
           ", must be [local experts, ranks * max_tokens, ", handle.hidden, "]");
  const bool wants_gradient = gradients::wants_any(*x) || gradients::wants_any(*topk_weights);
  const py::object rows_object =
      zero_copy ? rows_of_zero_copy(view, state, handle, *x) : py::reinterpret_borrow<py::object>(given[1]);
  const Tensor& rows = THPVariable_Unpack(rows_object.ptr());
  buffer.receive_lost("combine");
  const bool is_plain = are_plain && is_plain_thread() && !(how.has_hook && wants_gradient);
  const CommStream stream = how.stream(buffer, view);
  Tensor made = stream.run([&] {
    if (!how.has_hook) {
      return call_op(torch_ops::ll_combine_deepep(), is_plain, seq, rows, *src_info, *topk_weights, *topk_idx,
                     handle.num_experts, handle.max_tokens, wait_cost.optional(), out.optional(), 0, use_logfmt);
    }
    return call_op(torch_ops::ll_combine_deepep_send(), is_plain, seq, rows, *src_info, *topk_weights, *topk_idx,
                   handle.num_experts, handle.max_tokens, wait_cost.optional(), out.optional(),
                   load_integer("num_sms", given[14]), use_logfmt, row_signals.optional(),
                   load_integer("rows_per_signal", given[12]), load_integer("signal_threshold", given[13]));
  });
  const py::object result = out ? py::reinterpret_borrow<py::object>(given[9]) : taken(wrap(std::move(made)));
  // Of a combine with neither, the op says it.
  if (wants_gradient && (zero_copy || (out && how.has_hook))) {
    py::module_::import("nccl_ep.gradients")
        .attr("refuse_backward")("low_latency_combine with out= or zero_copy", result);
  }
  const py::object event =
      taken(stream.overlap({rows_object.ptr(), given[2], given[3], handle.source(), given[10], result.ptr()}));
  py::object receive = py::none();
  if (how.has_hook) {
    receive = taken(new_pending_call([are_plain, seq, src_info = Tensor(*src_info), topk = topk_idx->size(1),
                                      num_experts = handle.num_experts, max_tokens = handle.max_tokens,
                                      waits = std::optional<Tensor>(wait_cost.optional()),
                                      out = THPVariable_Unpack(result.ptr()), use_logfmt] {
      call_op(torch_ops::ll_combine_deepep_recv(), are_plain && is_plain_thread(), seq, src_info, topk, num_experts,
              max_tokens, waits, out, 0, use_logfmt);
    }));
  }
  return tuple_of(new_reference(result), new_reference(event), new_reference(receive));
}

PyMethodDef low_latency_calls[] = {method<&low_latency_dispatch>("low_latency_dispatch"),
                                   method<&low_latency_combine>("low_latency_combine")};
const Added added_low_latency(low_latency_calls);

}  // namespace
}  // namespace ep::call
