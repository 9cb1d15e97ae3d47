#include "torch/call/given.h"

#include "base/check.h"

namespace ep::call {

void check_named(const char* function, const char* name, PyObject* object) {
  py::dict named;
  named[name] = py::reinterpret_borrow<py::object>(object);
  check_in_python(function, **named);
}

bool load_all(const at::Tensor& seq, std::initializer_list<Wanted> wanted) {
  bool are_plain = true, are_there = true;
  for (const Wanted& each : wanted) {
    are_plain = each.tensor.load(each.object, seq) && are_plain;
    are_there = are_there && (each.is_option || each.object != Py_None);
  }
  if (are_plain && are_there) return true;
  py::list names, objects;
  for (const Wanted& each : wanted) {
    if (!each.is_option) check_named("require_tensors", each.name, each.object);
    names.append(each.name);
    objects.append(py::handle(each.object));
  }
  check_in_python("require_on", seq, names, objects);
  return false;
}

bool load_tensors(PyObject* given, const at::Tensor& seq, std::vector<at::Tensor>& tensors) {
  if (given == Py_None) return true;
  const auto add = [&](PyObject* object) {
    if (!THPVariable_Check(object)) return false;
    tensors.push_back(THPVariable_Unpack(object));
    return THPVariable_CheckExact(object) && is_beside(seq, tensors.back());
  };
  if (!PyTuple_Check(given) && !PyList_Check(given)) return add(given);
  bool are_plain = true;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
    are_plain = add(PySequence_Fast_GET_ITEM(given, i)) && are_plain;
  }
  return are_plain;
}

int64_t load_integer_slowly(const char* name, PyObject* object) {
  check_named("require_int64", name, object);
  const auto index = taken(PyNumber_Index(object));
  const int64_t value = PyLong_AsLongLong(index.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

RoutingNumbers load_routing(PyObject* const* given) {
  constexpr auto kTable = RoutingNumbers::kTable;
  const auto load = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::array{load_number(kTable[kIndex], given[kIndex])...};
  };
  const auto numbers = load(std::make_index_sequence<kTable.size()>{});
  return RoutingNumbers::unpack(numbers.data());
}

c10::SymInt load_length(const char* name, PyObject* object) {
  if (!PyLong_CheckExact(object) && torch::is_symint(object)) return py::handle(object).cast<c10::SymInt>();
  return load_integer(name, object);
}

bool load_bool_slowly(const char* name, PyObject* object) {
  check_named("require_bools", name, object);
  const int is_true = PyObject_IsTrue(object);
  if (is_true < 0) throw py::error_already_set();
  return is_true != 0;
}

std::string repr(PyObject* object) { return py::repr(object).cast<std::string>(); }

void refuse_name(const char* what, PyObject* object, const char* const* names, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; i++) all += (i == 0 ? "" : ", ") + std::string(names[i]);
  raise(ErrorKind::kInvalidArgument, what, " is ", repr(object), ", must be one of ", all);
}

}  // namespace ep::call
