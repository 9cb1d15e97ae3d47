#include "torch/common/errors.h"

#include <pybind11/pybind11.h>

#include <string_view>

#include "torch/common/lock.h"

namespace py = pybind11;

namespace ep {
namespace {

const char* class_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kTimeout:
      return "TimeoutError";
    case ErrorKind::kMismatch:
      return "MismatchError";
    case ErrorKind::kSystem:
      return "SystemError";
    default:
      return "UsageError";
  }
}

// The text may quote what another rank has sent, in any bytes.
void set(PyObject* type, std::string_view text) {
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
  if (message) PyErr_SetObject(type, message.ptr());
}
void set(const char* name, std::string_view text) { set(py::module_::import("nccl_ep.errors").attr(name).ptr(), text); }

}  // namespace

void set_in_python(const Error& error) {
  if (error.kind() == ErrorKind::kInvalidArgument) {
    set(PyExc_ValueError, error.what());
    return;
  }
  set(class_of(error.kind()), error.what());
}

void throw_overflow(const std::string& text) {
  const LockHold lock;
  set("OverflowError", text);
  throw py::error_already_set();
}

void throw_in_python(const Error& error) {
  const LockHold lock;
  set_in_python(error);
  throw py::error_already_set();
}

}  // namespace ep
