#include "torch/call/stream_event.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Stream.h>

#include <utility>

#include "torch/call/types.h"
#include "torch/common/lock.h"

#if defined(EP_WITH_CUDA)
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace ep::call {

c10::Stream stream_of(PyObject* object) {
  TORCH_CHECK_TYPE(THPStream_Check(object), "a ", Py_TYPE(object)->tp_name, ", must be a stream");
  const auto* stream = reinterpret_cast<THPStream*>(object);
  return c10::Stream::unpack3(stream->stream_id, static_cast<c10::DeviceIndex>(stream->device_index),
                              static_cast<c10::DeviceType>(stream->device_type));
}

namespace {

// Events that nobody holds, by device: to make one and to destroy it takes as long as a call of the driver each.
// Never destroyed, as the driver may be gone by then. Under the interpreter's lock.
std::vector<std::vector<c10::Event>>& idle_events() {
  static auto* events = new std::vector<std::vector<c10::Event>>;
  return *events;
}
std::vector<c10::Event>& idle_events_of(const c10::Stream& stream) {
  const auto device = static_cast<size_t>(stream.device_index());
  if (idle_events().size() <= device) idle_events().resize(device + 1);
  return idle_events()[device];
}

// Torch asks for the current device and sets it, before and after what it calls of the driver. That is needed for an
// event's first time, and for a default stream of another device, whose handle means that of the current one.
#if defined(EP_WITH_CUDA)
bool is_for_driver(const c10::Event& event, const c10::Stream& stream) {
  return event.device_type() == at::kCUDA && event.was_marked_for_recording() && is_current(stream.device()) &&
         c10::impl::GPUTrace::get_trace() == nullptr;  // a tool of torch that follows events
}
cudaEvent_t event_of(const c10::Event& event) { return static_cast<cudaEvent_t>(event.eventId()); }

void record(c10::Event& event, const c10::Stream& stream) {
  if (!is_for_driver(event, stream)) return event.record(stream);
  C10_CUDA_CHECK(cudaEventRecord(event_of(event), c10::cuda::CUDAStream(stream).stream()));
}
void wait_for(const c10::Event& event, const c10::Stream& stream) {
  if (!is_for_driver(event, stream)) return event.block(stream);
  C10_CUDA_CHECK(cudaStreamWaitEvent(c10::cuda::CUDAStream(stream).stream(), event_of(event), 0));
}
#else
void record(c10::Event& event, const c10::Stream& stream) { event.record(stream); }
void wait_for(const c10::Event& event, const c10::Stream& stream) { event.block(stream); }
#endif

struct StreamEvent {
  PyObject_HEAD struct Fields {
    // First, as in torch.Event: torch.Stream.wait_event looks for it there.
    c10::Event event;  // on `own`
    c10::Stream caller, own;
    PyObject* kept;                 // a tuple of tensors
    bool has_been_awaited = false;  // by `caller`
  } fields;
};
StreamEvent::Fields& fields_of(PyObject* self) { return reinterpret_cast<StreamEvent*>(self)->fields; }

// What Tensor::record_stream does, below all modes of torch: these may call Python.
void tell_allocator(PyObject* tensors, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl device(stream.device_type());
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
    try {
      const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(tensors, i));
      if (!tensor.is_cpu()) device.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    } catch (...) {  // no memory for the allocator's note, or the process ends
    }
  }
}

int drop_tensors(PyObject* self) {
  StreamEvent::Fields& fields = fields_of(self);
  if (fields.kept != nullptr && !fields.has_been_awaited) tell_allocator(fields.kept, fields.own);
  Py_CLEAR(fields.kept);
  return 0;
}
int visit(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(fields_of(self).kept);
  return 0;
}
void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  drop_tensors(self);
  StreamEvent::Fields& fields = fields_of(self);
  idle_events_of(fields.own).push_back(std::move(fields.event));
  fields.~Fields();
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

// wait(stream=None): the stream waits for the event. By default the current one of the current device, as by
// torch.cuda.Event.
PyObject* wait(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  const Py_ssize_t num_names = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  TORCH_CHECK_TYPE(count + num_names <= 1, count + num_names, " arguments, not one stream");
  TORCH_CHECK_TYPE(num_names == 0 || PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "stream") == 0,
                   "there is no such argument: the only one is stream");
  StreamEvent::Fields& fields = fields_of(self);
  const c10::impl::VirtualGuardImpl device(fields.own.device_type());
  const bool is_given = count + num_names == 1 && given[0] != Py_None;
  const c10::Stream stream = is_given ? stream_of(given[0]) : current_stream_of(device.getDevice());
  {
    const LockRelease no_lock;
    wait_for(fields.event, stream);
  }
  fields.has_been_awaited |= stream == fields.caller;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}
PyObject* query(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(fields_of(self).event.query());
  END_HANDLE_TH_ERRORS
}
PyObject* synchronize(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS {
    const LockRelease no_lock;
    fields_of(self).event.synchronize();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyTypeObject* stream_event_type() {
  static PyMethodDef methods[] = {
      {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&wait)), METH_FASTCALL | METH_KEYWORDS,
       "wait(stream=None): the stream, by default the current one, waits for the event."},
      {"query", &query, METH_NOARGS, "Whether the event has been reached."},
      {"synchronize", &synchronize, METH_NOARGS, "The host waits for the event."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
                                {Py_tp_traverse, reinterpret_cast<void*>(&visit)},
                                {Py_tp_clear, reinterpret_cast<void*>(&drop_tensors)},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {.name = "nccl_ep._C.StreamEvent",
                             .basicsize = sizeof(StreamEvent),
                             .itemsize = 0,
                             .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             .slots = slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  return reinterpret_cast<PyTypeObject*>(type);
}

namespace {

py::object new_stream_event(const c10::Stream& caller, const c10::Stream& own, const py::object& kept) {
  PyTypeObject* const type = stream_event_type();
  auto* made = type == nullptr ? nullptr : PyObject_GC_New(StreamEvent, type);
  if (made == nullptr) return {};
  std::vector<c10::Event>& idle = idle_events_of(own);
  if (idle.empty()) idle.emplace_back(own.device_type());
  new (&made->fields) StreamEvent::Fields{std::move(idle.back()), caller, own, new_reference(kept)};
  idle.pop_back();
  auto event = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
  PyObject_GC_Track(event.ptr());
  record(made->fields.event, own);
  return event;
}

}  // namespace

// NOLINTNEXTLINE(misc-no-recursion): tuples of results are two deep
void add_tensors(PyObject* objects, Tensors& found) {
  if (objects == Py_None) return;
  if (!PyTuple_Check(objects) && !PyList_Check(objects)) {
    if (THPVariable_Check(objects)) found.push_back(objects);
    return;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(objects); i++) {
    add_tensors(PySequence_Fast_GET_ITEM(objects, i), found);
  }
}

PyObject* tuple_of_tensors(const Tensors& tensors) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(tensors.size()));
  for (size_t i = 0; tuple != nullptr && i < tensors.size(); i++) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), new_reference(tensors[i]));
  }
  return tuple;
}

CommStream::CommStream(PyObject* given, const at::Device& device) : is_async_(given != Py_None) {
  if (!is_async_ || device.is_cpu()) return;
  caller_ = current_stream_of(device);
  own_ = stream_of(given);
}

PyObject* CommStream::overlap(std::initializer_list<PyObject*> objects) const {
  if (!is_async_) return no_event();
  if (!own_) return new_overlap(Py_None, Py_None);
  Tensors tensors;
  for (PyObject* each : objects) add_tensors(each, tensors);
  const auto kept = py::reinterpret_steal<py::object>(tuple_of_tensors(tensors));
  const py::object event = kept ? new_stream_event(*caller_, *own_, kept) : kept;
  return event ? new_overlap(event.ptr(), kept.ptr()) : nullptr;
}

}  // namespace ep::call
