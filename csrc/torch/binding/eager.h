// Operations of Python in one call of C++: arguments, op and result, with no function of torch called from Python. Each
// either does the whole operation, or nothing and returns None: then nccl_ep/functional.py goes its own way, which is
// what defines the operation, its checks and its errors. So nothing is refused here; what is not plain is left.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "torch/binding/fast_call.h"

namespace ep::eager {

namespace py = pybind11;

// Arguments of an operation that are kept for the next one.
struct KnownDispatch {
  // num_experts, mode, layout, max_tokens, capacity, expert_alignment, quant, zero_padding, num_sms, as
  // nccl_ep/config.py has checked them; of mode "auto" also the bytes of a row, else 0.
  static constexpr size_t kGiven = 9;
  std::array<py::object, kGiven> given;
  int64_t topk = 0, row_bytes = 0;
  // What followed.
  std::vector<int64_t> config;
  int64_t capacity = 0;
  bool is_ht = false, is_rank_major = false;
  py::object num_experts, topk_object, max_tokens, layout, capacity_object, mode, alignment;

  bool is_for(const std::array<PyObject*, kGiven>& call, int64_t call_topk, int64_t call_row_bytes) const;
};

// What a buffer keeps for these calls: as a capsule, since each of them looks for it.
struct Buffer {
  static constexpr const char* kName = "nccl_ep.EagerBuffer";
  static constexpr size_t kMaxKnown = 512;

  py::object seq, num_ranks;
  py::object open_sends;  // by the names of their kinds; the dictionary of nccl_ep.Buffer
  bool raises_overflow = false;
  std::vector<std::shared_ptr<const KnownDispatch>> known;
  py::object comm_stream;  // asked for once, for all views of the buffer

  Buffer(const py::object& seq, const py::object& num_ranks, const py::object& open_sends, bool raises_overflow);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Which `owner` has as that attribute: `_eager` of a nccl_ep.Buffer, `_view_eager` of DeepEP's. Null: none.
  template <fast_call::Name kAttribute>
  static Buffer* of(PyObject* owner) {
    static PyObject* const name = PyUnicode_InternFromString(kAttribute.text);
    return of(owner, name);
  }
  // Of the buffer whose tensor it is; null where it is gone.
  static Buffer* of(const at::Tensor& seq);
  // What get_comm_stream() of the owner returns, borrowed. Null is an error of Python.
  PyObject* comm_stream_of(PyObject* owner);
  // Of low latency's operations of the kind none is to be received first.
  bool is_ready_for(const char* kind) const;
  const at::Tensor& tensor() const { return THPVariable_Unpack(seq.ptr()); }

 private:
  static Buffer* of(PyObject* owner, PyObject* name);
};

// No mode and no transform of torch is on in this thread that would see the call: fast_call::is_plain_thread(), or what
// is on is the mode of torch.set_default_device alone. It gives a device to functions that make tensors, of which no op
// is one.
bool is_plain_thread();

// A class of Python whose fields are slots.
class Slots {
 public:
  Slots() = default;
  Slots(const py::object& type, std::initializer_list<const char*> names);
  bool is_of(PyObject* object) const { return Py_TYPE(object) == type_; }
  PyObject* make() const { return type_->tp_alloc(type_, 0); }
  // Takes the reference; null is an error of Python that is set, and stays.
  bool set(PyObject* object, size_t field, PyObject* value) const {
    at(object, field) = value;
    return value != nullptr;
  }
  PyObject* get(PyObject* object, size_t field) const { return at(object, field); }  // borrowed, or null

 private:
  PyObject*& at(PyObject* object, size_t field) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offsets_[field]);
  }
  PyTypeObject* type_ = nullptr;  // of a module, which stays
  std::vector<Py_ssize_t> offsets_;
};

// A new EventOverlap without an event; one of an EventHandle of `event`, with `extra_tensors`.
PyObject* no_event();
PyObject* new_overlap(PyObject* event, PyObject* extra_tensors);

inline PyObject* new_reference(PyObject* object) {
  Py_INCREF(object);
  return object;
}
inline PyObject* new_reference(const py::object& object) { return new_reference(object.ptr()); }

// Plain tensors of the buffer's device and layout; what is optional may be none.
inline bool is_beside(const at::Tensor& seq, const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.device() == seq.device();
}
inline bool is_beside(const at::Tensor& seq, const std::optional<at::Tensor>& tensor) {
  return !tensor || is_beside(seq, *tensor);
}

template <class... Given>
bool wants_gradient(const Given&... given) {
  return (gradients::wants_any(given.get()) || ...);
}

// Calls an op without what torch does above its kernel. Small results share an allocation.
template <fast_call::Name kName, class Function>
struct Op;
template <fast_call::Name kName, class Result, class... Args>
struct Op<kName, Result(Args...)> {
  static Result run(Args... args) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(kName.text, "").template typed<Result(Args...)>();
    const py::gil_scoped_release no_gil;
    const at::AutoDispatchBelowAutograd below;
    const PackedResultsScope packed(true);
    return handle.call(args...);
  }
};

// Natively and by DeepEP's normal mode.
using HtCombine =
    Op<"nccl_ep::ht_combine",
       torch_ops::HtCombined(const at::Tensor&, const torch_ops::Optional&, const torch_ops::Optional&,
                             const at::Tensor&, const at::Tensor&, const torch_ops::Optional&,
                             const torch_ops::Optional&, at::TensorList, int64_t, int64_t, at::IntArrayRef)>;

// Null where there is none.
inline py::object attribute(PyObject* object, PyObject* name) {
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
  if (!found) PyErr_Clear();
  return found;
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

inline PyObject* number(int64_t value) { return PyLong_FromLongLong(value); }

// A tensor of the entries of `whole` from `first` on, in the same memory and no view of it: as new_tensors() makes
// them.
at::Tensor part_of(const at::Tensor& whole, int64_t first, at::IntArrayRef sizes);

// Of a row of DeepEP's normal mode on its way there with its scales, or home in bf16.
constexpr int64_t normal_row_bytes(int64_t hidden, int64_t element_bytes, int64_t scale_bytes) {
  return std::max(hidden * element_bytes + (scale_bytes + 15) / 16 * 16, 2 * hidden);
}

inline bool is_number(PyObject* object, int64_t& value) {
  if (object == nullptr || !PyLong_Check(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

// A function of the module: one that takes its arguments by position.
template <PyObject* (*kFunction)(PyObject* const*, Py_ssize_t)>
PyObject* guarded_call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return kFunction(given, count);
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

void define(py::module_& module);

}  // namespace ep::eager
