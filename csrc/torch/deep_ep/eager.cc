// DeepEP's low-latency methods in one call of C++ (torch/binding/eager.h). nccl_ep/deep_ep/v1/low_latency.py has the
// long way, which defines them.
#include "torch/binding/eager.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>

#include "torch/binding/pending_call.h"
#include "torch/binding/stream_event.h"
#include "torch/ops/arguments.h"

namespace ep::eager {
namespace {

using at::Tensor;
using fast_call::Argument;
using fast_call::wrap;

using Dispatched = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
#define EP_DISPATCH_TYPES                                                                        \
  const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, int64_t, int64_t, int64_t, \
      const OptionalTensor&, const OptionalTensor&, int64_t
using Dispatch = Op<"nccl_ep::ll_dispatch_deepep", Dispatched(EP_DISPATCH_TYPES)>;
using DispatchSend = Op<"nccl_ep::ll_dispatch_deepep_send", Dispatched(EP_DISPATCH_TYPES)>;
#define EP_COMBINE_TYPES                                                                                              \
  const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, const OptionalTensor&, \
      const OptionalTensor&, int64_t, bool
using Combine = Op<"nccl_ep::ll_combine_deepep", Tensor(EP_COMBINE_TYPES)>;
using CombineSend =
    Op<"nccl_ep::ll_combine_deepep_send", Tensor(EP_COMBINE_TYPES, const OptionalTensor&, int64_t, int64_t)>;

using DispatchRecv = Receive<"nccl_ep::ll_dispatch_deepep_recv",
                             void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, const Tensor&, at::ScalarType, int64_t, int64_t, bool, int64_t,
                                  int64_t, int64_t, const OptionalTensor&, const OptionalTensor&, int64_t)>;
using CombineRecv =
    Receive<"nccl_ep::ll_combine_deepep_recv", void(const Tensor&, const Tensor&, int64_t, int64_t, int64_t,
                                                    const OptionalTensor&, const Tensor&, int64_t, bool)>;

bool is_true(PyObject* object) { return object == Py_True; }
bool are_bools(std::initializer_list<PyObject*> objects) {
  return std::all_of(objects.begin(), objects.end(), [](PyObject* each) { return PyBool_Check(each); });
}

// self, x, topk_idx, max_tokens, num_experts, recv_stats, wait_cost, use_fp8, round_scale, use_ue8m0, async_finish,
// return_recv_hook. With the hook a pair: the results but for it, and what receives them when it is called.
PyObject* low_latency_dispatch(PyObject* const* given, Py_ssize_t count) {
  if (count != 12 || !is_plain_thread()) Py_RETURN_NONE;
  Buffer* buffer = Buffer::of<"_view_eager">(given[0]);
  Argument<Tensor> x, topk_idx;
  Argument<OptionalTensor> recv_stats, wait_cost;
  Argument<int64_t> max_tokens, num_experts;
  if (buffer == nullptr || buffer->raises_overflow || !x.load(given[1]) || !topk_idx.load(given[2]) ||
      !max_tokens.load(given[3]) || !num_experts.load(given[4]) || !recv_stats.load(given[5]) ||
      !wait_cost.load(given[6]) || !are_bools({given[7], given[8], given[9], given[10], given[11]})) {
    Py_RETURN_NONE;
  }
  const bool use_fp8 = is_true(given[7]), round_scale = is_true(given[8]), use_ue8m0 = is_true(given[9]);
  const bool is_async = is_true(given[10]), has_hook = is_true(given[11]);
  if (is_async && has_hook) Py_RETURN_NONE;
  if (use_fp8 && use_ue8m0 && !round_scale) Py_RETURN_NONE;
  const Quant quant = !use_fp8      ? Quant::kNone
                      : use_ue8m0   ? Quant::kFp8Ue8m0
                      : round_scale ? Quant::kFp8Rounded
                                    : Quant::kFp8;
  const Tensor& seq = buffer->tensor();
  if (wants_gradient(x, recv_stats, wait_cost) || !is_beside(seq, x.get()) || !is_beside(seq, topk_idx.get()) ||
      !is_beside(seq, recv_stats.get()) || !is_beside(seq, wait_cost.get()) || x.get().dim() != 2 ||
      topk_idx.get().dim() != 2 || !buffer->is_ready_for("dispatch")) {
    Py_RETURN_NONE;
  }
  PyObject* const own_stream = is_async ? buffer->comm_stream_of(given[0]) : Py_None;
  if (own_stream == nullptr) return nullptr;
  const CommStream comm_stream(own_stream, seq.device());
  auto [rows, scales, weights, counts, src_info, layout_range] = comm_stream.run([&] {
    return (has_hook ? &DispatchSend::run : &Dispatch::run)(
        seq, x.get(), OptionalTensor{}, topk_idx.get(), num_experts.get(), max_tokens.get(),
        static_cast<int64_t>(quant), recv_stats.get(), wait_cost.get(), 0);
  });
  std::function<PyObject*()> to_receive;
  if (has_hook) {
    to_receive =
        DispatchRecv(seq, rows, scales, weights, counts, src_info, layout_range, x.get().scalar_type(), x.get().size(0),
                     topk_idx.get().size(1), topk_idx.get().scalar_type() == at::kLong, num_experts.get(),
                     max_tokens.get(), static_cast<int64_t>(quant), recv_stats.get(), wait_cost.get(), 0);
  }
  const auto rows_object = py::reinterpret_steal<py::object>(wrap(std::move(rows)));
  const auto scales_object =
      use_fp8 ? py::reinterpret_steal<py::object>(wrap(std::move(scales))) : py::object(py::none());
  const auto counts_object = py::reinterpret_steal<py::object>(wrap(std::move(counts)));
  const auto source_object = py::reinterpret_steal<py::object>(wrap(std::move(src_info)));
  const auto range_object = py::reinterpret_steal<py::object>(wrap(std::move(layout_range)));
  if (!rows_object || !scales_object || !counts_object || !source_object || !range_object) return nullptr;
  const auto event = py::reinterpret_steal<py::object>(
      comm_stream.overlap({given[1], given[2], given[5], given[6], rows_object.ptr(), scales_object.ptr(),
                           counts_object.ptr(), source_object.ptr(), range_object.ptr()}));
  if (!event) return nullptr;
  PyObject* received =
      use_fp8 ? tuple_of(new_reference(rows_object), new_reference(scales_object)) : new_reference(rows_object);
  PyObject* handle = tuple_of(new_reference(source_object), new_reference(range_object), new_reference(given[3]),
                              number(x.get().size(1)), new_reference(given[4]));
  if (!has_hook) {
    return tuple_of(received, new_reference(counts_object), handle, new_reference(event), new_reference(Py_None));
  }
  PyObject* results = tuple_of(received, new_reference(counts_object), handle, new_reference(event));
  return tuple_of(results, new_pending_call(std::move(to_receive)));
}

// What a combine reads with zero_copy: the tensor that get_next_low_latency_combine_buffer has made. Null: it has not.
PyObject* scratch_of(PyObject* state, PyObject* const* sizes) {
  static PyObject* const name = PyUnicode_InternFromString("scratch");
  static PyObject* const kind = PyUnicode_InternFromString("combine");
  const py::object scratch = attribute(state, name);
  if (!scratch || !PyDict_CheckExact(scratch.ptr())) return nullptr;
  const auto key = py::reinterpret_steal<py::object>(
      tuple_of(new_reference(kind), new_reference(sizes[0]), new_reference(sizes[1]), new_reference(sizes[2])));
  PyObject* found = key ? PyDict_GetItemWithError(scratch.ptr(), key.ptr()) : nullptr;  // the dictionary has it
  if (found == nullptr) PyErr_Clear();
  return found;
}

// self, x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish, return_recv_hook, out, wait_cost. With
// the hook a pair, as above.
PyObject* low_latency_combine(PyObject* const* given, Py_ssize_t count) {
  if (count != 11 || !is_plain_thread() || !are_bools({given[5], given[6], given[7], given[8]})) Py_RETURN_NONE;
  const bool use_logfmt = is_true(given[5]), zero_copy = is_true(given[6]);
  const bool is_async = is_true(given[7]), has_hook = is_true(given[8]);
  if ((use_logfmt && zero_copy) || (is_async && has_hook)) Py_RETURN_NONE;
  if (!PyTuple_CheckExact(given[4]) && !PyList_CheckExact(given[4])) Py_RETURN_NONE;
  // A tuple stays what it is, whatever other threads do while the operation runs.
  const auto handle = py::reinterpret_steal<py::object>(PySequence_Tuple(given[4]));
  if (!handle) return nullptr;
  if (PyTuple_GET_SIZE(handle.ptr()) != 5) Py_RETURN_NONE;
  PyObject* const* elements = PySequence_Fast_ITEMS(handle.ptr());
  Buffer* buffer = Buffer::of<"_view_eager">(given[0]);
  Argument<Tensor> x, topk_idx, topk_weights, src_info;
  Argument<OptionalTensor> out, wait_cost;
  Argument<int64_t> max_tokens, hidden, num_experts;
  if (buffer == nullptr || !x.load(given[1]) || !topk_idx.load(given[2]) || !topk_weights.load(given[3]) ||
      !src_info.load(elements[0]) || !max_tokens.load(elements[2]) || !hidden.load(elements[3]) ||
      !num_experts.load(elements[4]) || !out.load(given[9]) || !wait_cost.load(given[10])) {
    Py_RETURN_NONE;
  }
  const Tensor& seq = buffer->tensor();
  if (wants_gradient(x, topk_weights, out, wait_cost) || !is_beside(seq, x.get()) || !is_beside(seq, topk_idx.get()) ||
      !is_beside(seq, topk_weights.get()) || !is_beside(seq, src_info.get()) || !is_beside(seq, out.get()) ||
      !is_beside(seq, wait_cost.get()) || x.get().dim() != 3 || topk_idx.get().dim() != 2 ||
      x.get().size(2) != hidden.get()) {
    Py_RETURN_NONE;
  }
  static PyObject* const state_name = PyUnicode_InternFromString("_state");
  static PyObject* const unreceived_name = PyUnicode_InternFromString("unreceived");
  const py::object state = attribute(given[0], state_name);
  const py::object unreceived = state ? attribute(state.ptr(), unreceived_name) : state;
  if (!unreceived) Py_RETURN_NONE;
  if (!unreceived.is_none()) {  // of this handle?
    const Tensor* open = fast_call::plain_tensor(unreceived.ptr());
    if (open == nullptr || open->data_ptr() == src_info.get().data_ptr()) Py_RETURN_NONE;
  }
  Argument<Tensor> rows;
  auto rows_object = py::reinterpret_borrow<py::object>(given[1]);
  if (!zero_copy) {
    rows.load(rows_object.ptr());
  } else {
    rows_object = py::reinterpret_borrow<py::object>(scratch_of(state.ptr(), elements + 2));
    if (!rows_object || !rows.load(rows_object.ptr()) || rows.get().sizes() != x.get().sizes() ||
        rows.get().scalar_type() != x.get().scalar_type() || !x.get().is_contiguous()) {
      Py_RETURN_NONE;
    }
  }
  if (!buffer->is_ready_for("combine")) Py_RETURN_NONE;
  PyObject* const own_stream = is_async ? buffer->comm_stream_of(given[0]) : Py_None;
  if (own_stream == nullptr) return nullptr;
  const auto run = [&](auto op, const auto&... signals) {
    return op(seq, rows.get(), src_info.get(), topk_weights.get(), topk_idx.get(), num_experts.get(), max_tokens.get(),
              wait_cost.get(), out.get(), 0, use_logfmt, signals...);
  };
  const CommStream comm_stream(own_stream, seq.device());
  Tensor made =
      comm_stream.run([&] { return has_hook ? run(&CombineSend::run, OptionalTensor{}, 0, 0) : run(&Combine::run); });
  const auto result = py::reinterpret_steal<py::object>(out.get() ? new_reference(given[9]) : wrap(std::move(made)));
  if (!result) return nullptr;
  const auto event = py::reinterpret_steal<py::object>(
      comm_stream.overlap({rows_object.ptr(), given[2], given[3], elements[0], given[10], result.ptr()}));
  if (!event) return nullptr;
  if (!has_hook) return tuple_of(new_reference(result), new_reference(event), new_reference(Py_None));
  CombineRecv to_receive(seq, src_info.get(), topk_idx.get().size(1), num_experts.get(), max_tokens.get(),
                         wait_cost.get(), THPVariable_Unpack(result.ptr()), 0, use_logfmt);
  PyObject* results = tuple_of(new_reference(result), new_reference(event));
  return tuple_of(results, new_pending_call(std::move(to_receive)));
}

PyMethodDef methods[] = {method<&low_latency_dispatch>("low_latency_dispatch_eager"),
                         method<&low_latency_combine>("low_latency_combine_eager")};
const Added added(methods);

}  // namespace
}  // namespace ep::eager
