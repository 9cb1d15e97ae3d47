#include "torch/common/lock.h"

#include <unistd.h>

namespace ep {
namespace {

[[noreturn]] void stay() {
  for (;;) pause();
}

// A thread that is unwound through the scope stays in it. The scope must not be one of a noexcept function: there the
// compiler leaves destructors out. To catch would not do within a handler of another exception.
class StayIfUnwound {
 public:
  ~StayIfUnwound() {
    if (!is_over_) stay();
  }
  void end() { is_over_ = true; }

 private:
  bool is_over_ = false;
};

template <class Take>
[[gnu::noinline]] auto take_or_stay(Take take) {
  StayIfUnwound guard;
  const auto taken = take();
  guard.end();
  return taken;
}

}  // namespace

void LockRelease::take_back(PyThreadState* state) {
  take_or_stay([state] {
    PyEval_RestoreThread(state);
    return true;
  });
}

LockHold::LockHold() : state_(take_or_stay([] { return PyGILState_Ensure(); })) {}

LockHold::~LockHold() {
  if (PyGILState_Check() == 0) stay();
  PyGILState_Release(state_);
}

PyObject* call_python(PyObject* function, PyObject* argument) {
  return take_or_stay([=] { return PyObject_CallOneArg(function, argument); });
}

}  // namespace ep
