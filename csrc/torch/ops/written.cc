#include "torch/ops/written.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <vector>

namespace ep::written {
namespace {

// A tensor that counts, and what it has counted.
struct Counted {
  at::Tensor tensor;
  uint32_t version;
};

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

void note(PyObject* object, std::vector<Counted>& counted) {
  if (object == nullptr) return;
  if (THPVariable_Check(object)) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (counts(tensor)) counted.push_back({tensor, version_of(tensor)});
  } else if (PyList_Check(object) || PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); i++)
      note(PySequence_Fast_GET_ITEM(object, i), counted);
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
  std::vector<Counted> counted;
  const Positions positions = positions_of(schema);
  for (size_t i = 0; positions >> i != 0; i++) {
    if ((positions >> i & 1) != 0) note(argument(i, schema.arguments()[i].name(), given, count, names), counted);
  }
  PyObject* result = PyObject_Vectorcall(usual, given, count, names);
  for (const Counted& each : counted) {
    // Nobody has marked it.
    if (result != nullptr && version_of(each.tensor) == each.version) mark(each.tensor);
  }
  return result;
}

}  // namespace ep::written
