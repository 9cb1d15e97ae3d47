// Ops called from Python without torch's parser of arguments: it takes 0.2 us for a number and 0.7 us for a dtype, more
// in all than the rest of a call. The dispatcher is called as by torch's own functions, with C++ values. Where a call
// is not plain, torch's way of calling the op is taken, so that both always do the same: where a tensor is a
// subclass's, a number is a symbol, a mode or a transform is on, arguments are named or do not fit.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch/common/lock.h"
#include "torch/ops/device.h"
#include "torch/ops/gradient_wanted.h"
#include "torch/ops/op_types.h"
#include "torch/ops/written.h"

namespace ep::fast_call {

// An argument as a kernel of an op takes it. Copies of tensors live longer than the call, which is without the
// interpreter's lock: to drop one may need it. An argument of the call lives as long and need not be copied. load:
// false where the value is not plain.
template <class T>
struct Argument;

inline const at::Tensor* plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  return &THPVariable_Unpack(object);
}

template <>
struct Argument<at::Tensor> {
  const at::Tensor* value = nullptr;
  bool load(PyObject* object) { return (value = plain_tensor(object)) != nullptr; }
  const at::Tensor& get() const { return *value; }
};
template <>
struct Argument<std::optional<at::Tensor>> {
  using Borrow = c10::MaybeOwnedTraits<at::Tensor>;
  std::optional<at::Tensor> value;
  Argument() = default;
  ~Argument() {
    if (value) Borrow::destroyBorrow(*value);
  }
  Argument(const Argument&) = delete;
  Argument& operator=(const Argument&) = delete;
  bool load(PyObject* object) {
    if (object == Py_None) return true;
    const at::Tensor* tensor = plain_tensor(object);
    if (tensor != nullptr) value = Borrow::createBorrow(*tensor);
    return tensor != nullptr;
  }
  const std::optional<at::Tensor>& get() const { return value; }
};
template <>
struct Argument<at::TensorList> {
  std::vector<at::Tensor> value;
  bool load(PyObject* object) {
    if (!PyList_CheckExact(object)) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); i++) {
      const at::Tensor* tensor = plain_tensor(PyList_GET_ITEM(object, i));
      if (tensor == nullptr) return false;
      value.push_back(*tensor);
    }
    return true;
  }
  at::TensorList get() const { return value; }
};
inline bool load_number(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

template <>
struct Argument<int64_t> {
  int64_t value = 0;
  bool load(PyObject* object) { return load_number(object, value); }
  int64_t get() const { return value; }
};
template <>
struct Argument<at::IntArrayRef> {
  c10::SmallVector<int64_t, 12> value;
  bool load(PyObject* object) {
    if (!PyTuple_CheckExact(object) && !PyList_CheckExact(object)) return false;
    value.resize(PySequence_Fast_GET_SIZE(object));
    for (size_t i = 0; i < value.size(); i++) {
      if (!load_number(PySequence_Fast_GET_ITEM(object, static_cast<Py_ssize_t>(i)), value[i])) return false;
    }
    return true;
  }
  at::IntArrayRef get() const { return value; }
};
template <>
struct Argument<bool> {
  bool value = false;
  bool load(PyObject* object) {
    value = object == Py_True;
    return PyBool_Check(object);
  }
  bool get() const { return value; }
};
template <>
struct Argument<at::ScalarType> {
  at::ScalarType value = at::kFloat;
  bool load(PyObject* object) {
    if (!THPDtype_Check(object)) return false;
    value = reinterpret_cast<THPDtype*>(object)->scalar_type;
    return true;
  }
  at::ScalarType get() const { return value; }
};
inline PyObject* wrap(at::Tensor&& tensor) { return THPVariable_Wrap(std::move(tensor)); }
template <class... Tensors>
PyObject* wrap(std::tuple<Tensors...>&& tensors) {
  PyObject* tuple = PyTuple_New(sizeof...(Tensors));
  if (tuple == nullptr) return nullptr;
  Py_ssize_t i = 0;
  const auto put = [&](at::Tensor& tensor) {
    PyObject* wrapped = wrap(std::move(tensor));
    PyTuple_SET_ITEM(tuple, i++, wrapped);
    return wrapped != nullptr;
  };
  if (std::apply([&](auto&... each) { return (put(each) && ...); }, tensors)) return tuple;
  Py_DECREF(tuple);
  return nullptr;
}

// torch.overrides.redispatch_function (torch 2.15) waits for torch's parser of this call to take note of it.
template <class Tls>
bool skips_a_hop() {
  if constexpr (requires { Tls::peek_skip_next(); }) return Tls::peek_skip_next();
  return false;
}

// Nothing is on in this thread that would see the call, but for modes of torch's functions.
inline bool is_plain_but_for_modes() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - c10::default_included_set).empty() && !skips_a_hop<at::impl::PythonTorchFunctionTLS>();
}
// No mode and no transform of torch is on in this thread.
inline bool is_plain_thread() { return is_plain_but_for_modes() && !at::impl::torch_function_mode_enabled(); }

// Where nobody else has to see the call, torch's dispatcher leads to the op's kernel; where a derivative is wanted, to
// the op's gradient. Without the interpreter's lock. packs_results: small results share an allocation.
template <class Result, class... Args>
Result call_plainly(const c10::TypedOperatorHandle<Result(Args...)>& op, bool packs_results,
                    const std::type_identity_t<Args>&... args) {
  const bool wants_gradient = (gradients::wants_any(args) || ...);
  const LockRelease no_lock;
  std::optional<at::AutoDispatchBelowAutograd> below;
  if (!wants_gradient) below.emplace();
  const PackedResultsScope packed(packs_results);
  return op.call(args...);
}

template <size_t kSize>
struct Name {
  char text[kSize];
  constexpr Name(const char (&given)[kSize]) { std::copy_n(given, kSize, text); }
};

// The kernel of an op that the function implements, and marks what it writes.
template <Name kOp, auto kFunction, class Function>
struct Kernel;
template <Name kOp, auto kFunction, class Result, class... Args>
struct Kernel<kOp, kFunction, Result(Args...)> {
  static Result run(Args... args) {
    static_assert(sizeof...(Args) <= 64);
    static const written::Positions positions = written::positions_of(kOp.text);
    if (positions == 0) return kFunction(args...);
    const written::MarkAtEnd<std::remove_cvref_t<Args>...> marks(positions, args...);
    return kFunction(args...);
  }
};

// kBatchSize: small results share an allocation.
template <Name kName, bool kBatchSize, class Function>
struct Call;
template <Name kName, bool kBatchSize, class Result, class... Args>
struct Call<kName, kBatchSize, Result(Args...)> {
  // `usual`: torch's way. `names`: of the last arguments, or null.
  static PyObject* run(PyObject* usual, PyObject* const* given, Py_ssize_t count, PyObject* names) {
    HANDLE_TH_ERRORS
    return call(usual, given, count, names, std::index_sequence_for<Args...>{});
    END_HANDLE_TH_ERRORS
  }

 private:
  template <size_t... kIndex>
  static PyObject* call(PyObject* usual, PyObject* const* given, Py_ssize_t count, PyObject* names,
                        std::index_sequence<kIndex...>) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(kName.text, "").template typed<Result(Args...)>();
    std::tuple<Argument<std::remove_cvref_t<Args>>...> args;
    const bool is_plain = count == sizeof...(Args) && names == nullptr && is_plain_thread() &&
                          (std::get<kIndex>(args).load(given[kIndex]) && ...);
    if (!is_plain) return written::call_usual(handle.schema(), usual, given, count, names);
    const auto enqueue = [&] { return call_plainly(handle, kBatchSize, std::get<kIndex>(args).get()...); };
    if constexpr (std::is_void_v<Result>) {
      enqueue();
      Py_RETURN_NONE;
    } else {
      return wrap(enqueue());
    }
  }
};

template <Name kName, bool kBatchSize, class Function>
PyMethodDef method(const char* name) {
  const auto run = reinterpret_cast<void (*)()>(&Call<kName, kBatchSize, Function>::run);
  return {name, reinterpret_cast<PyCFunction>(run), METH_FASTCALL | METH_KEYWORDS, nullptr};
}

// The kernel of an op, for the dispatcher and for Python. `self` of a method is torch's way of calling the op.
struct Op {
  void (*add)(torch::Library& library);
  PyMethodDef method, packed;
};

// Of all files.
inline std::vector<std::span<Op>>& all_ops() {
  static std::vector<std::span<Op>> ops;
  return ops;
}

struct Added {
  explicit Added(std::span<Op> ops) { all_ops().push_back(ops); }
};

inline void implement(std::span<const Op> ops, torch::Library& library) {
  for (const Op& op : ops) op.add(library);
}
// A backward pass that comes to an op without a gradient ends there with an error, not with gradients that are missing.
#define EP_OP_NAME(op) #op,
inline void refuse_gradients(std::span<const Op> ops, torch::Library& library) {
  constexpr std::string_view kWith[] = {EP_OPS_WITH_GRADIENT(EP_OP_NAME) EP_DEEPEP_OPS_WITH_GRADIENT(EP_OP_NAME)};
  for (const Op& op : ops) {
    if (std::ranges::find(kWith, op.method.ml_name) != std::end(kWith)) continue;
    library.impl(op.method.ml_name, torch::autograd::autogradNotImplementedFallback());
  }
}

inline void refuse_under_vmap(const c10::OperatorHandle& op, c10::Stack*) {
  raise(
      ErrorKind::kInvalidUsage, op.schema().name(),
      " does not run under torch.vmap (is_grads_batched, vectorize): it is one operation of all ranks; call it on the "
      "whole batch");
}
inline void refuse_vmap(std::span<const Op> ops, torch::Library& library) {
  for (const Op& op : ops) {
    library.impl(op.method.ml_name, torch::CppFunction::makeFromBoxedFunction<&refuse_under_vmap>());
  }
}

}  // namespace ep::fast_call

// Of the function that is the op's kernel, and has its name.
#define EP_OP(op)                                                                           \
  ::ep::fast_call::Op {                                                                     \
    [](torch::Library& library) {                                                           \
      library.impl(#op, &::ep::fast_call::Kernel<"nccl_ep::" #op, &op, decltype(op)>::run); \
    },                                                                                      \
        ::ep::fast_call::method<"nccl_ep::" #op, false, decltype(op)>(#op),                 \
        ::ep::fast_call::method<"nccl_ep::" #op, true, decltype(op)>(#op)                   \
  }

// Outside of namespaces: `ops` is an array in `ep` of what EP_OP makes.
#define EP_IMPLEMENT(ops)                                                                                      \
  static const ::ep::fast_call::Added added_##ops(::ep::ops);                                                  \
  TORCH_LIBRARY_IMPL(nccl_ep, CPU, library) { ::ep::fast_call::implement(::ep::ops, library); }                \
  TORCH_LIBRARY_IMPL(nccl_ep, CUDA, library) { ::ep::fast_call::implement(::ep::ops, library); }               \
  TORCH_LIBRARY_IMPL(nccl_ep, FuncTorchBatched, library) { ::ep::fast_call::refuse_vmap(::ep::ops, library); } \
  TORCH_LIBRARY_IMPL(nccl_ep, Batched, library) { ::ep::fast_call::refuse_vmap(::ep::ops, library); }          \
  TORCH_LIBRARY_IMPL(nccl_ep, Autograd, library) { ::ep::fast_call::refuse_gradients(::ep::ops, library); }
