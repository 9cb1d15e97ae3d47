// Marks what an op has written, as torch's own operations do: a graph that has saved the tensor raises in its backward
// pass. Kernels mark what they are given, whoever calls. Of a wrapper (a tensor of a subclass or of a transform) they
// are given what is inside: the wrapper is marked where Python calls the op.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace ep::written {

using Positions = uint64_t;  // a bit for each argument of an op

// Of what the schema says an op writes, without `seq`: ops change it for compilers alone, which keep their order by it,
// and passes save it for backward (nccl_ep/ops.py: _keep_version_of_seq).
inline Positions positions_of(const c10::FunctionSchema& schema) {
  Positions positions = 0;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const c10::Argument& argument = schema.arguments()[i];
    if (argument.alias_info() == nullptr || !argument.alias_info()->isWrite() || argument.name() == "seq") continue;
    positions |= Positions{1} << i;
  }
  return positions;
}
inline Positions positions_of(const char* op) {
  return positions_of(c10::Dispatcher::singleton().findSchemaOrThrow(op, "").schema());
}

// A tensor of inference mode counts no versions: no graph can save it.
inline bool counts(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->version_counter().enabled();
}

inline void mark(const at::Tensor& tensor) {
  if (counts(tensor)) tensor.unsafeGetTensorImpl()->bump_version();
}
inline void mark(const std::optional<at::Tensor>& tensor) {
  if (tensor) mark(*tensor);
}
inline void mark(at::TensorList tensors) {
  for (const at::Tensor& each : tensors) mark(each);
}

// The arguments of a call, of which it marks those written at its end. A call that fails may have written, too.
template <class... Args>
class MarkAtEnd {
 public:
  MarkAtEnd(Positions positions, const Args&... args) : positions_(positions), args_(args...) {}
  ~MarkAtEnd() { mark_all(std::index_sequence_for<Args...>{}); }
  MarkAtEnd(const MarkAtEnd&) = delete;
  MarkAtEnd& operator=(const MarkAtEnd&) = delete;

 private:
  template <size_t... kIndex>
  void mark_all(std::index_sequence<kIndex...>) const {
    (mark_one<kIndex>(), ...);
  }
  template <size_t kIndex>
  void mark_one() const {
    const auto& arg = std::get<kIndex>(args_);
    if constexpr (requires { mark(arg); }) {
      if ((positions_ >> kIndex & 1) != 0) mark(arg);
    }
  }

  const Positions positions_;
  const std::tuple<const Args&...> args_;
};

// A call of an op by Python in torch's own way, which `usual` is. `names`: of the last arguments, or null. Before it,
// the wrappers that it writes into are marked: the op's own graph may save them.
PyObject* call_usual(const c10::FunctionSchema& schema, PyObject* usual, PyObject* const* given, Py_ssize_t count,
                     PyObject* names);

}  // namespace ep::written
