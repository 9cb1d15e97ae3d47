#include "torch/call/buffer_state.h"

#include <unordered_map>

namespace ep::call {
namespace {

// By the numbers of their tensors. With the interpreter's lock.
std::unordered_map<int64_t, BufferState*>& all_buffers() {
  static auto* all = new std::unordered_map<int64_t, BufferState*>;
  return *all;
}

}  // namespace

BufferState::BufferState(const py::object& seq, const py::object& num_ranks, const py::object& open_sends,
                         bool raises_overflow)
    : seq(seq), num_ranks(num_ranks), open_sends(open_sends), raises_overflow(raises_overflow) {
  TORCH_CHECK_TYPE(THPVariable_CheckExact(seq.ptr()) && PyDict_CheckExact(open_sends.ptr()),
                   "not the tensor of a buffer and its dictionary");
  all_buffers()[tensor().size(0)] = this;
}

BufferState::~BufferState() { all_buffers().erase(tensor().size(0)); }

BufferState* BufferState::of(PyObject* owner, PyObject* name) {
  // Which the owner keeps. Without the owner's own __getattr__, as this is of every call.
  const auto capsule = py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(owner, name));
  void* found = capsule ? PyCapsule_GetPointer(capsule.ptr(), kName) : nullptr;
  if (found == nullptr) PyErr_Clear();
  return static_cast<BufferState*>(found);
}

BufferState& BufferState::of_argument(PyObject* given) {
  if (BufferState* found = of<"_call">(given)) return *found;
  py::module_::import("nccl_ep.buffer").attr("require_buffer")(py::handle(given));
  throw py::type_error("not a nccl_ep.Buffer");
}

BufferState& BufferState::of_handle(const at::Tensor& seq, int64_t num_ranks) {
  const auto found = seq.dim() == 4 ? all_buffers().find(seq.sym_size(0).expect_int()) : all_buffers().end();
  if (found != all_buffers().end() && num_ranks == seq.sym_size(1)) return *found->second;
  py::module_::import("nccl_ep.buffer").attr("find_buffer")(seq, num_ranks);
  throw py::type_error("not the tensor of a buffer");
}

PyObject* BufferState::comm_stream_of(PyObject* owner) {
  static PyObject* const name = PyUnicode_InternFromString("get_comm_stream");
  if (!comm_stream) comm_stream = taken(PyObject_CallMethodNoArgs(owner, name));
  return comm_stream.ptr();
}

void BufferState::receive_lost_slowly(const char* kind) const {
  const py::object owner = py::module_::import("nccl_ep.buffer").attr("find_buffer")(seq);
  py::module_::import("nccl_ep.pending").attr("receive_lost")(owner, kind);
}

}  // namespace ep::call
