// The receive of a split call, which Python calls later.
#include <memory>
#include <utility>

#include "torch/call/hand_over.h"

namespace ep::call {
namespace {

struct Callable {
  PyObject_HEAD std::function<void()> call;
};

void free_callable(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  std::destroy_at(&reinterpret_cast<Callable*>(self)->call);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* run(PyObject* self, PyObject* args, PyObject* names) {
  HANDLE_TH_ERRORS
  const Py_ssize_t count = PyTuple_GET_SIZE(args) + (names == nullptr ? 0 : PyDict_GET_SIZE(names));
  TORCH_CHECK_TYPE(count == 0, "it takes no arguments, not ", count);
  reinterpret_cast<Callable*>(self)->call();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyTypeObject* callable_type() {
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&free_callable)},
                                {Py_tp_call, reinterpret_cast<void*>(&run)},
                                {0, nullptr}};
  static PyType_Spec spec = {.name = "nccl_ep._C.PendingCall",
                             .basicsize = sizeof(Callable),
                             .itemsize = 0,
                             .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             .slots = slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

PyObject* new_pending_call(std::function<void()> call) {
  PyTypeObject* const type = callable_type();
  auto* made = type == nullptr ? nullptr : PyObject_New(Callable, type);
  if (made == nullptr) return nullptr;
  std::construct_at(&made->call, std::move(call));
  return reinterpret_cast<PyObject*>(made);
}

}  // namespace ep::call
