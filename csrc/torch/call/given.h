// Arguments that Python gives. What is not at once what it must be goes to nccl_ep/checks.py, which refuses it in its
// words, or finds that it serves: a subclass of Tensor, a number of numpy.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

#include "runtime/options.h"
#include "torch/call/python.h"
#include "torch/common/load_option.h"

namespace ep::call {

// Calls that function of nccl_ep/checks.py.
template <class... Args>
void check_in_python(const char* function, Args&&... args) {
  py::module_::import("nccl_ep.checks").attr(function)(std::forward<Args>(args)...);
}
// With one argument, by its name.
void check_named(const char* function, const char* name, PyObject* object);

// Plain tensors of the buffer's device and layout; what is optional may be none.
inline bool is_beside(const at::Tensor& seq, const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
         tensor.device() == seq.device();
}

// A tensor, or None. It lives as long as the call, and is not counted.
class GivenTensor {
 public:
  GivenTensor() = default;
  ~GivenTensor() { give_back(); }
  GivenTensor(const GivenTensor&) = delete;
  GivenTensor& operator=(const GivenTensor&) = delete;

  // Whether there is nothing to find fault with: none, or one of torch's own class beside `seq`.
  bool load(PyObject* object, const at::Tensor& seq) {
    give_back();
    if (object == Py_None) return true;
    if (!THPVariable_Check(object)) return false;
    value_ = Borrow::createBorrow(THPVariable_Unpack(object));
    return THPVariable_CheckExact(object) && is_beside(seq, *value_);
  }
  explicit operator bool() const { return value_.has_value(); }
  const at::Tensor& operator*() const { return *value_; }
  const at::Tensor* operator->() const { return &*value_; }
  const std::optional<at::Tensor>& optional() const { return value_; }

 private:
  using Borrow = c10::MaybeOwnedTraits<at::Tensor>;
  void give_back() {
    if (value_) Borrow::destroyBorrow(*value_);
    value_.reset();
  }
  std::optional<at::Tensor> value_;
};

// Loads the tensors of a call. Whether all are of torch's own class; what is wrong is refused. Those that are no option
// must be there.
struct Wanted {
  const char* name;
  PyObject* object;
  GivenTensor& tensor;
  bool is_option = false;
};
bool load_all(const at::Tensor& seq, std::initializer_list<Wanted> wanted);

// None: none. A list or a tuple of tensors, or one by itself. False: Python is to look at them.
bool load_tensors(PyObject* given, const at::Tensor& seq, std::vector<at::Tensor>& tensors);

int64_t load_integer_slowly(const char* name, PyObject* object);
inline int64_t load_integer(const char* name, PyObject* object) {
  int overflow = 0;
  if (PyLong_CheckExact(object)) {
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0) return value;
  }
  return load_integer_slowly(name, object);
}
// num_experts, topk, max_tokens, layout, alignment, which is what a handle has.
RoutingNumbers load_routing(PyObject* const* given);
// Also a symbol of a compiler.
c10::SymInt load_length(const char* name, PyObject* object);

// The number of an option, which a table describes: load_option(), with a short way for an int.
inline int64_t load_number(const Option& option, PyObject* object) {
  int overflow = 0;
  if (PyLong_Check(object) && (option.kind == OptionKind::kInteger || option.kind == OptionKind::kChoice)) {
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0 && value >= option.least && value <= option.most) return value;
  }
  return load_option(option, object);
}
// The option of that name.
template <class Options, fast_call::Name kName, class T>
void load_option_into(T& value, PyObject* object) {
  constexpr auto kOption = *std::ranges::find(Options::kTable, std::string_view(kName.text), &Option::name);
  value = from_number<T>(load_number(kOption, object));
}

bool load_bool_slowly(const char* name, PyObject* object);
inline bool load_bool(const char* name, PyObject* object) {
  return PyBool_Check(object) ? object == Py_True : load_bool_slowly(name, object);
}

inline bool is_text(PyObject* object, const char* text) {
  return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, text) == 0;
}
// The number of the name; "None" is None.
[[noreturn]] void refuse_name(const char* what, PyObject* object, const char* const* names, size_t count);
template <const auto& kNames>
int load_name(const char* what, PyObject* object) {
  static const auto interned = [] {  // as constants of Python are
    std::array<PyObject*, kNames.size()> made;
    for (size_t i = 0; i < made.size(); i++) {
      made[i] = kNames[i] == std::string_view("None") ? Py_None : PyUnicode_InternFromString(kNames[i]);
    }
    return made;
  }();
  for (size_t i = 0; i < kNames.size(); i++) {
    if (object == interned[i]) return static_cast<int>(i);
  }
  for (size_t i = 0; i < kNames.size(); i++) {
    if (interned[i] != Py_None && is_text(object, kNames[i])) return static_cast<int>(i);
  }
  refuse_name(what, object, kNames.data(), kNames.size());
}

std::string repr(PyObject* object);

}  // namespace ep::call
