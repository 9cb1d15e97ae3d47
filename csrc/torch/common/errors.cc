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

thread_local int backward_passes = 0;  // one within another, of a second derivative

constexpr const char* kBackwardQuestion =
    "; this is a backward pass: does every rank call it, and do the same tensors want gradients on all ranks?";

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
  const bool is_of_ranks = error.kind() == ErrorKind::kTimeout || error.kind() == ErrorKind::kMismatch;
  set(class_of(error.kind()), concat(error.what(), is_of_ranks && backward_passes > 0 ? kBackwardQuestion : ""));
}

InBackwardPass::InBackwardPass() { backward_passes++; }
InBackwardPass::~InBackwardPass() { backward_passes--; }

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
