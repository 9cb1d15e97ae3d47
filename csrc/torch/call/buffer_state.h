// What a nccl_ep.Buffer keeps for calls.
#pragma once

#include <memory>

#include "torch/call/python.h"

namespace ep::call {

// As a capsule of Python, since every call looks for it.
struct BufferState {
  static constexpr const char* kName = "nccl_ep.CallBuffer";

  py::object seq, num_ranks;
  py::object open_sends;  // by the names of their kinds; the dictionary of nccl_ep.Buffer
  bool raises_overflow = false;
  py::object comm_stream;            // asked for once, for all views of the buffer
  std::vector<int64_t> last_served;  // numbers of the last dispatch, for the log

  BufferState(const py::object& seq, const py::object& num_ranks, const py::object& open_sends, bool raises_overflow);
  ~BufferState();
  BufferState(const BufferState&) = delete;
  BufferState& operator=(const BufferState&) = delete;

  // Which `owner` has as that attribute: `_call` of a nccl_ep.Buffer, `_view_call` of DeepEP's. Null: none.
  template <fast_call::Name kAttribute>
  static BufferState* of(PyObject* owner) {
    static PyObject* const name = PyUnicode_InternFromString(kAttribute.text);
    return of(owner, name);
  }
  static BufferState& of_argument(PyObject* given);  // TypeError of what is no nccl_ep.Buffer
  // Of a handle's tensor. UsageError where it is gone, or of another number of ranks.
  static BufferState& of_handle(const at::Tensor& seq, int64_t num_ranks);

  // What get_comm_stream() of the owner returns, borrowed. Throws an error of Python.
  PyObject* comm_stream_of(PyObject* owner);
  const at::Tensor& tensor() const { return THPVariable_Unpack(seq.ptr()); }
  // Before an operation of low latency of the kind: what was sent and nobody can receive any more, is received.
  void receive_lost(const char* kind) const {
    if (PyDict_GET_SIZE(open_sends.ptr()) > 0) receive_lost_slowly(kind);
  }

 private:
  static BufferState* of(PyObject* owner, PyObject* name);
  void receive_lost_slowly(const char* kind) const;
};

}  // namespace ep::call
