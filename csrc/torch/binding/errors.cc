#include "torch/binding/errors.h"

#include <pybind11/pybind11.h>

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

void set(const char* name, const char* text) {
  const py::object type = py::module_::import("nccl_ep.errors").attr(name);
  PyErr_SetString(type.ptr(), text);
}

}  // namespace

void set_in_python(const Error& error) {
  if (error.kind() == ErrorKind::kInvalidArgument) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return;
  }
  set(class_of(error.kind()), error.what());
}

void throw_overflow(const std::string& text) {
  const py::gil_scoped_acquire gil;
  set("OverflowError", text.c_str());
  throw py::error_already_set();
}

void throw_in_python(const Error& error) {
  const py::gil_scoped_acquire gil;
  set_in_python(error);
  throw py::error_already_set();
}

}  // namespace ep
