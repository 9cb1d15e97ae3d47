#include "torch/ops/written.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>

namespace ep::written {
namespace {

constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});

void mark_wrappers(PyObject* object) {
  if (object == nullptr) return;
  if (THPVariable_Check(object)) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.defined() && tensor.key_set().has_any(kWrappers)) mark(tensor);
  } else if (PyList_Check(object) || PyTuple_Check(object)) {
    PyObject* const* items = PySequence_Fast_ITEMS(object);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); i++) mark_wrappers(items[i]);
  }
}

// Borrowed; null where it is not given.
PyObject* argument(size_t index, const std::string& name, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  if (static_cast<Py_ssize_t>(index) < count) return given[index];
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; i++) {
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), name.c_str()) == 0) return given[count + i];
  }
  return nullptr;
}

}  // namespace

PyObject* call_usual(const c10::FunctionSchema& schema, PyObject* usual, PyObject* const* given, Py_ssize_t count,
                     PyObject* names) {
  const Positions positions = positions_of(schema);
  for (size_t i = 0; positions >> i != 0; i++) {
    if ((positions >> i & 1) != 0) mark_wrappers(argument(i, schema.arguments()[i].name(), given, count, names));
  }
  return PyObject_Vectorcall(usual, given, count, names);
}

}  // namespace ep::written
