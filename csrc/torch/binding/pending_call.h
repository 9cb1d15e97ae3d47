// The second half of an operation, which Python calls later: a call of an op without a result, with its arguments kept
// as the op takes them.
#pragma once

#include <Python.h>
#include <torch/csrc/DynamicTypes.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "torch/binding/eager.h"

namespace ep::eager {

// A callable of Python without arguments, which may be called again.
PyObject* new_pending_call(std::function<PyObject*()> call);

// torch.ops.nccl_ep's op of that name, called as by Python: takes the reference to `args`.
PyObject* call_usual_op(const char* name, PyObject* args);

inline PyObject* as_python(const at::Tensor& tensor) { return fast_call::wrap(at::Tensor(tensor)); }
inline PyObject* as_python(const std::optional<at::Tensor>& tensor) {
  return tensor ? as_python(*tensor) : new_reference(Py_None);
}
inline PyObject* as_python(int64_t value) { return number(value); }
inline PyObject* as_python(bool value) { return PyBool_FromLong(value ? 1 : 0); }
inline PyObject* as_python(at::ScalarType type) {
  return new_reference(reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
}

// For a pending call: the op, with these arguments.
template <fast_call::Name kName, class Function>
class Receive;
template <fast_call::Name kName, class... Args>
class Receive<kName, void(Args...)> {
 public:
  explicit Receive(std::remove_cvref_t<Args>... args) : args_(std::move(args)...) {}
  PyObject* operator()() const {
    const bool wants_gradient =
        std::apply([](const auto&... each) { return (gradients::wants_any(each) || ...); }, args_);
    if (is_plain_thread() && !wants_gradient) {
      std::apply(&Op<kName, void(Args...)>::run, args_);
      Py_RETURN_NONE;
    }
    return call_usual_op(kName.text,
                         std::apply([](const auto&... each) { return tuple_of(as_python(each)...); }, args_));
  }

 private:
  std::tuple<std::remove_cvref_t<Args>...> args_;
};

}  // namespace ep::eager
