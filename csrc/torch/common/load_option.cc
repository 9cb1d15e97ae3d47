#include "torch/common/load_option.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include "torch/common/errors.h"

namespace py = pybind11;

namespace ep {
namespace {

[[noreturn]] void refuse_kind(const Option& option, PyObject* given, const char* must) {
  PyErr_Clear();
  const bool is_shown = given == Py_None || PyLong_Check(given) || PyFloat_Check(given) || PyUnicode_Check(given);
  PyErr_Format(PyExc_TypeError, is_shown ? "%s is %R, must be %s" : "%s is a %s, must be %s", option.name,
               is_shown ? static_cast<const void*>(given) : static_cast<const void*>(Py_TYPE(given)->tp_name), must);
  throw py::error_already_set();
}

// 1 and 0 count as True and False, as do numpy's and torch's, and None, which DeepEP takes for no.
int64_t load_flag(const Option& option, PyObject* given) {
  if (PyBool_Check(given) || given == Py_None) return given == Py_True ? 1 : 0;
  const bool is_array = PyObject_HasAttrString(given, "ndim") && py::handle(given).attr("ndim").cast<int>() != 0;
  for (const int64_t value : {0, 1}) {
    if (!is_array && py::handle(given).equal(py::int_(value))) return value;
  }
  refuse_kind(option, given, "True or False");
}

int64_t load_integer(const Option& option, PyObject* given) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(given));
  if (!index) refuse_kind(option, given, "an integer");
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow == 0) return value;
  PyErr_Format(PyExc_ValueError, "%s is %R, must be from %lld to %lld", option.name, index.ptr(),
               static_cast<long long>(option.least), static_cast<long long>(option.most));
  throw py::error_already_set();
}

// A tensor would lose its gradient. Of Python's own numbers torch is not asked: it finds out by isinstance(), which
// takes longer than all other checks of a call.
int64_t load_float(const Option& option, PyObject* given) {
  const bool is_number = PyFloat_Check(given) || PyLong_Check(given);
  if (!is_number && THPVariable_Check(given)) refuse_kind(option, given, "a number");
  const double value = PyLong_CheckExact(given) ? PyLong_AsDouble(given) : PyFloat_AsDouble(given);
  if (value == -1.0 && PyErr_Occurred() != nullptr) refuse_kind(option, given, "a number");
  return to_number(static_cast<float>(value));
}

}  // namespace

int64_t load_option(const Option& option, PyObject* given) {
  const int64_t number = option.kind == OptionKind::kFlag    ? load_flag(option, given)
                         : option.kind == OptionKind::kFloat ? load_float(option, given)
                                                             : load_integer(option, given);
  try {
    check_option(option, number);
  } catch (const Error& error) {
    throw_in_python(error);
  }
  return number;
}

}  // namespace ep
