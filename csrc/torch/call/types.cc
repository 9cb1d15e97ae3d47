#include "torch/call/types.h"

#include <c10/core/SafePyObject.h>
#include <structmember.h>
#include <torch/csrc/PyInterpreter.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/check.h"
#include "runtime/call.h"
#include "torch/call/buffer_state.h"
#include "torch/call/define.h"
#include "torch/call/hand_over.h"
#include "torch/call/stream_event.h"

namespace ep::call {
namespace {

struct AllTypes : Types {
  Slots overlap, event;
  PyTypeObject* default_device_mode = nullptr;  // torch.set_default_device's
};
AllTypes& all_types() {
  static auto* made = new AllTypes;
  return *made;
}
constexpr size_t kEvent = 0, kExtraTensors = 1, kOverlapFields = 4;

PyObject* overlap_of(PyObject* event, PyObject* extra_tensors) {
  const Slots& overlap = all_types().overlap;
  PyObject* made = overlap.make();
  if (made == nullptr) return nullptr;
  overlap.set(made, kEvent, new_reference(event));
  overlap.set(made, kExtraTensors, new_reference(extra_tensors));
  for (size_t each = kExtraTensors + 1; each < kOverlapFields; each++) overlap.set(made, each, new_reference(Py_None));
  return made;
}

void set_types(const py::object& handle, const py::object& output, const py::object& layout, const py::object& overlap,
               const py::object& event, const py::object& default_device_mode) {
  AllTypes& types = all_types();
  types.handle = Slots(handle, {"tensor", "seq", "num_tokens", "topk", "num_experts", "max_tokens", "layout",
                                "capacity", "num_ranks", "mode", "slots", "alignment", "weights"});
  types.output =
      Slots(output, {"x", "scales", "topk_idx", "weights", "row_expert", "handle", "extra", "carrier", "_info"});
  for (size_t i = 0; i < types.layouts.size(); i++) types.layouts[i] = layout(i);
  for (size_t i = 0; i < types.modes.size(); i++) {
    types.modes[i] = taken(PyUnicode_InternFromString(kModeNames[i]));
  }
  types.overlap = Slots(overlap, {"event", "extra_tensors", "_hook", "_releases"});
  types.event = Slots(event, {"_event"});
  default_device_mode.inc_ref();
  types.default_device_mode = reinterpret_cast<PyTypeObject*>(default_device_mode.ptr());
}

py::capsule new_buffer(const py::object& seq, const py::object& num_ranks, const py::object& open_sends,
                       bool raises_overflow) {
  auto made = std::make_unique<BufferState>(seq, num_ranks, open_sends, raises_overflow);
  return py::capsule(made.release(), BufferState::kName, [](PyObject* capsule) {
    delete static_cast<BufferState*>(PyCapsule_GetPointer(capsule, BufferState::kName));
  });
}

}  // namespace

const Types& types() { return all_types(); }

PyObject* no_event() { return overlap_of(Py_None, Py_None); }

PyObject* new_overlap(PyObject* event, PyObject* extra_tensors) {
  const auto handle = taken(all_types().event.make());
  all_types().event.set(handle.ptr(), 0, new_reference(event));
  return overlap_of(handle.ptr(), extra_tensors);
}

bool is_plain_thread() {
  using Tls = at::impl::PythonTorchFunctionTLS;
  if (!fast_call::is_plain_but_for_modes()) return false;
  if (!at::impl::torch_function_mode_enabled()) return true;
  for (int64_t i = 0; i < Tls::stack_len(); i++) {
    if (Py_TYPE(Tls::get_stack_at(i)->ptr(getPyInterpreter())) != all_types().default_device_mode) return false;
  }
  return true;
}

py::object call_by_python(const c10::OperatorHandle& op, PyObject* args) {
  const auto given = taken(args);
  const std::string name = op.operator_name().name.substr(std::string_view("nccl_ep::").size());
  const py::object ops = py::module_::import("torch").attr("ops").attr("nccl_ep");
  return taken(PyObject_Call(ops.attr(name.c_str()).attr("default").ptr(), given.ptr(), nullptr));
}

const at::Tensor& tensor_of(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "an op returned a ", Py_TYPE(object)->tp_name, ", must be a tensor");
  return THPVariable_Unpack(object);
}

Slots::Slots(const py::object& type, std::initializer_list<const char*> names)
    : type_(reinterpret_cast<PyTypeObject*>(type.ptr())) {
  type.inc_ref();
  for (const char* name : names) {
    const py::object member = type.attr(name);
    if (Py_TYPE(member.ptr()) != &PyMemberDescr_Type) {
      raise(ErrorKind::kInvalidArgument, type_->tp_name, ".", name, " is no slot");
    }
    offsets_.push_back(reinterpret_cast<PyMemberDescrObject*>(member.ptr())->d_member->offset);
  }
}

void define(py::module_& m) {
  m.def("set_types", &set_types, py::arg("handle"), py::arg("output"), py::arg("layout"), py::arg("overlap"),
        py::arg("event"), py::arg("default_device_mode"),
        "The classes of what calls take and return, and the mode of torch.set_default_device, past which ops are "
        "called.");
  m.def("call_buffer", &new_buffer, py::arg("seq"), py::arg("num_ranks"), py::arg("open_sends"),
        py::arg("raises_overflow"));
  m.attr("StreamEvent") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(stream_event_type()));
  for (const std::span<PyMethodDef> each_file : all_methods()) {
    for (PyMethodDef& each : each_file) {
      m.attr(each.ml_name) = taken(PyCFunction_New(&each, nullptr));
    }
  }
}

}  // namespace ep::call
