// What a call does with streams beside its operation, in one call of C++: from Python each step passes torch's modes
// and checks. torch's own guards and events serve, so that nothing here is CUDA's.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include "torch/call/given.h"
#include "torch/call/stream_event.h"

namespace ep::call {
namespace {

using at::Tensor;

void wait_for(const c10::Stream& stream, const c10::Stream& first) {
  c10::Event event(stream.device_type());
  event.record(first);
  event.block(stream);
}

// The number of the current stream of the tensor's device; None on the CPU.
PyObject* current_stream_id(PyObject* const* given, Py_ssize_t count) {
  const Tensor* tensor = count == 1 ? fast_call::plain_tensor(given[0]) : nullptr;
  TORCH_CHECK_TYPE(tensor != nullptr, "not a tensor");
  if (tensor->is_cpu()) Py_RETURN_NONE;
  return number(current_stream_of(tensor->device()).id());
}

// tensor, id, call: calls it with that stream of the tensor's device as the current one; any on the CPU.
PyObject* call_on_stream(PyObject* const* given, Py_ssize_t count) {
  const Tensor* tensor = count == 3 ? fast_call::plain_tensor(given[0]) : nullptr;
  TORCH_CHECK_TYPE(tensor != nullptr, "not a tensor, the number of a stream and what to call");
  if (tensor->is_cpu()) return PyObject_CallNoArgs(given[2]);
  const int64_t id = load_integer("the number of a stream", given[1]);
  if (id == current_stream_of(tensor->device()).id()) return PyObject_CallNoArgs(given[2]);
  const c10::StreamGuard on_stream(c10::Stream(c10::Stream::UNSAFE, tensor->device(), id));
  return PyObject_CallNoArgs(given[2]);
}

// call, stream, inputs, previous, event. Runs `call` on that stream, which first waits for the current one, or, where
// `previous` is not None, for what calling that makes it wait for. The end is recorded in `event`, an event of torch;
// where that is None the current stream waits for the end. Returns the result, and the tensors of it and of `inputs`.
PyObject* run_on_stream(PyObject* const* given, Py_ssize_t count) {
  TORCH_CHECK_TYPE(count == 5, count, " arguments, not 5");
  const c10::Stream stream = stream_of(given[1]), current = current_stream_of(stream.device());
  PyObject *previous = given[3], *event = given[4];
  if (previous == Py_None) wait_for(stream, current);
  py::object result;
  {
    const c10::StreamGuard on_stream(stream);
    if (previous != Py_None && !py::reinterpret_steal<py::object>(PyObject_CallNoArgs(previous))) return nullptr;
    result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(given[0]));
    if (!result) return nullptr;
    static PyObject* const record = PyUnicode_InternFromString("record");
    if (event != Py_None && !py::reinterpret_steal<py::object>(PyObject_CallMethodOneArg(event, record, given[1]))) {
      return nullptr;
    }
  }
  Tensors tensors;
  add_tensors(given[2], tensors);
  add_tensors(result.ptr(), tensors);
  // The allocator learns which stream uses what. Not in a capture: there memory that two streams use is not given back
  // before the end, and the tensors that an event holds are safe without.
  if (!is_capturing(current.device())) {
    for (PyObject* each : tensors) {
      const Tensor& tensor = THPVariable_Unpack(each);
      if (tensor.is_cpu()) continue;
      tensor.record_stream(stream);
      tensor.record_stream(current);
    }
  }
  if (event == Py_None) wait_for(current, stream);
  return tuple_of(new_reference(result), tuple_of_tensors(tensors));
}

PyMethodDef methods[] = {method<&current_stream_id>("current_stream_id"), method<&call_on_stream>("call_on_stream"),
                         method<&run_on_stream>("run_on_stream")};
const Added added(methods);

}  // namespace
}  // namespace ep::call
