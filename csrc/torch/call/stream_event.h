// An operation on the buffer's own stream in one call of C++: async_finish of DeepEP's low-latency methods.
#pragma once

#include <Python.h>
#include <c10/util/SmallVector.h>

#include <initializer_list>
#include <optional>

#include "torch/ops/device.h"

namespace ep::call {

// _C.StreamEvent: the end of an operation on a buffer's own stream, with what torch.cuda.Event has to wait for it. Null
// is an error of Python.
PyTypeObject* stream_event_type();

// The stream of a torch.cuda.Stream; TypeError of another object.
c10::Stream stream_of(PyObject* object);

// The tensors of nested tuples and lists, borrowed; a new tuple of them.
using Tensors = c10::SmallVector<PyObject*, 16>;
void add_tensors(PyObject* objects, Tensors& found);
PyObject* tuple_of_tensors(const Tensors& tensors);

// Where the operation of a call runs. Its results belong to the caller's stream all the same, as DeepEP's do: their
// memory is free for that stream again once it has waited for the event. The allocator is told of the other stream only
// where the event goes without such a wait.
class CommStream {
 public:
  // given: what get_comm_stream() returns; None: the operation runs on the current stream.
  CommStream(PyObject* given, const at::Device& device);
  // What `call` returns, with its operation there.
  template <class Call>
  auto run(Call call) const {
    const LaunchStreamScope launches(caller_ ? &*caller_ : nullptr, own_ ? &*own_ : nullptr);
    return call();
  }
  // A new EventOverlap: of the end of what run() has called, and it holds the tensors of these objects; without an
  // event where that ran on the current stream.
  PyObject* overlap(std::initializer_list<PyObject*> objects) const;

 private:
  bool is_async_;
  std::optional<c10::Stream> caller_, own_;  // on GPUs, where is_async_
};

}  // namespace ep::call
