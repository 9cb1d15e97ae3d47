// The interpreter's lock: given up while a thread works or waits, and taken again.
//
// Once the interpreter ends, the thread that ends it has the lock. Python before 3.14 unwinds any other one that asks
// for it, through frames that cannot be unwound, and the process would be aborted. What is here lets such a thread stay
// where it is until the process is gone, as later versions do.
#pragma once

#include <Python.h>

namespace ep {

// Then whoever has the lock is the thread that ends it.
inline bool is_interpreter_ending() { return Py_IsInitialized() == 0; }

// Without the lock in a scope.
class LockRelease {
 public:
  LockRelease() : state_(PyEval_SaveThread()) {}
  ~LockRelease() { take_back(state_); }
  LockRelease(const LockRelease&) = delete;
  LockRelease& operator=(const LockRelease&) = delete;

 private:
  static void take_back(PyThreadState* state);

  PyThreadState* const state_;
};

// With the lock in a scope, whether the thread has it already or not. What is called in the scope may give it up, and
// not get it back.
class LockHold {
 public:
  LockHold();
  ~LockHold();
  LockHold(const LockHold&) = delete;
  LockHold& operator=(const LockHold&) = delete;

 private:
  const PyGILState_STATE state_;
};

// What the function of Python returns, or null with Python's error. With the lock. For C++ whose frames between must
// not be unwound either: they give references back.
PyObject* call_python(PyObject* function, PyObject* argument);

}  // namespace ep
