// From a call to its op: by fast_call.h: call_plainly; under a mode or a transform of torch, and with a tensor of a
// subclass, what Python calls by torch.ops. The arguments are the same.
#pragma once

#include <functional>
#include <tuple>
#include <type_traits>

#include "torch/call/python.h"
#include "torch/ops/op_types.h"

namespace ep::call {

// No mode and no transform of torch is on in this thread that would see the call: fast_call::is_plain_thread(), or what
// is on is the mode of torch.set_default_device alone. It gives a device to functions that make tensors, of which no op
// is one.
bool is_plain_thread();

// torch.ops.nccl_ep's op of that schema, called as by Python: takes the reference to `args`.
py::object call_by_python(const c10::OperatorHandle& op, PyObject* args);

const at::Tensor& tensor_of(PyObject* object);  // TypeError of what is none

template <class Result>
Result result_of(const py::object& made) {
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    return tensor_of(made.ptr());
  } else if constexpr (!std::is_void_v<Result>) {
    const auto all = taken(PySequence_Tuple(made.ptr()));
    constexpr auto kSize = std::tuple_size_v<Result>;
    TORCH_CHECK_TYPE(PyTuple_GET_SIZE(all.ptr()) == kSize, "an op returned ", PyTuple_GET_SIZE(all.ptr()),
                     " results, must be ", kSize);
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return Result{tensor_of(PyTuple_GET_ITEM(all.ptr(), kIndex))...};
    }
    (std::make_index_sequence<kSize>{});
  }
}

// `is_plain`: of the thread, and all tensors are torch's own class. Small results share an allocation, and those that
// there are not may be undefined, unless Python was called.
template <class Result, class... Args>
Result call_op(const c10::TypedOperatorHandle<Result(Args...)>& op, bool is_plain,
               const std::type_identity_t<Args>&... args) {
  if (!is_plain) return result_of<Result>(call_by_python(op, tuple_of(as_python(args)...)));
  return fast_call::call_plainly(op, true, args...);
}

// A callable of Python without arguments, which may be called again: the receive of a split call.
PyObject* new_pending_call(std::function<void()> call);

}  // namespace ep::call
