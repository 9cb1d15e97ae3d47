// Objects of Python as calls take and return them.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_symnode.h>

#include <initializer_list>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "torch/common/errors.h"
#include "torch/ops/fast_call.h"

namespace ep::call {

namespace py = pybind11;
using fast_call::wrap;

inline PyObject* new_reference(PyObject* object) {
  Py_INCREF(object);
  return object;
}
inline PyObject* new_reference(const py::object& object) { return new_reference(object.ptr()); }
inline PyObject* number(int64_t value) { return PyLong_FromLongLong(value); }

// What was made new; its error of Python is thrown.
inline py::object taken(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

// Takes the references; null where one is null, of which the error of Python stays.
template <class... Objects>
PyObject* tuple_of(Objects... objects) {
  PyObject* all[] = {objects...};
  PyObject* tuple = (objects && ...) ? PyTuple_New(sizeof...(objects)) : nullptr;
  for (size_t i = 0; i < sizeof...(objects); i++) {
    if (tuple != nullptr) {
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), all[i]);
    } else {
      Py_XDECREF(all[i]);
    }
  }
  return tuple;
}

// Null where there is none.
inline py::object attribute(PyObject* object, PyObject* name) {
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
  if (!found) PyErr_Clear();
  return found;
}

// ---- Values of C++

inline PyObject* as_python(const at::Tensor& tensor) { return wrap(at::Tensor(tensor)); }
inline PyObject* as_python(const std::optional<at::Tensor>& tensor) {
  return tensor ? as_python(*tensor) : new_reference(Py_None);
}
inline PyObject* as_python(int64_t value) { return number(value); }
inline PyObject* as_python(bool value) { return PyBool_FromLong(value ? 1 : 0); }
inline PyObject* as_python(const c10::SymInt& value) {
  const auto known = value.maybe_as_int();
  return known ? number(*known) : py::cast(value).release().ptr();
}
inline PyObject* as_python(at::ScalarType type) {
  return new_reference(reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
}
template <class Item>
PyObject* as_python(at::ArrayRef<Item> items) {
  py::list list(items.size());
  for (size_t i = 0; i < items.size(); i++) list[i] = taken(as_python(items[i]));
  return list.release().ptr();
}

inline PyObject* tuple_of_numbers(at::IntArrayRef numbers) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t i = 0; tuple != nullptr && i < numbers.size(); i++) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), number(numbers[i]));
  }
  return tuple;
}

// ---- Classes of Python

// One whose fields are slots.
class Slots {
 public:
  Slots() = default;
  Slots(const py::object& type, std::initializer_list<const char*> names);
  bool is_of(PyObject* object) const { return PyObject_TypeCheck(object, type_); }
  PyObject* make() const { return type_->tp_alloc(type_, 0); }
  // Takes the reference; null is an error of Python that is set, and stays.
  bool set(PyObject* object, size_t field, PyObject* value) const {
    at(object, field) = value;
    return value != nullptr;
  }
  // Borrowed; None where it was deleted.
  PyObject* get(PyObject* object, size_t field) const {
    PyObject* value = at(object, field);
    return value == nullptr ? Py_None : value;
  }

 private:
  PyObject*& at(PyObject* object, size_t field) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offsets_[field]);
  }
  PyTypeObject* type_ = nullptr;  // of a module, which stays
  std::vector<Py_ssize_t> offsets_;
};

// ---- Functions of the module, which take their arguments by position

template <PyObject* (*kFunction)(PyObject* const*, Py_ssize_t)>
PyObject* guarded_call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  try {
    return kFunction(given, count);
  } catch (const Error& error) {
    set_in_python(error);
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

template <PyObject* (*kFunction)(PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name) {
  const auto function = reinterpret_cast<void (*)()>(&guarded_call<kFunction>);
  return {name, reinterpret_cast<PyCFunction>(function), METH_FASTCALL, nullptr};
}

// Of all files.
inline std::vector<std::span<PyMethodDef>>& all_methods() {
  static std::vector<std::span<PyMethodDef>> methods;
  return methods;
}
struct Added {
  explicit Added(std::span<PyMethodDef> methods) { all_methods().push_back(methods); }
};

inline void require_count(Py_ssize_t count, Py_ssize_t wanted) {
  TORCH_CHECK_TYPE(count == wanted, count, " arguments, must be ", wanted);
}

}  // namespace ep::call
