#include "torch/observer.h"

#include <utility>

#include "runtime/recorder.h"
#include "torch/common/lock.h"

#if defined(EP_WITH_CUDA) || defined(EP_EMULATED_GPU)
#include "cuda/host/gpu_recording.h"
#endif

namespace py = pybind11;

namespace ep {
namespace {

RecordedGpus gpus() {
#if defined(EP_EMULATED_GPU)
  return {make_gpu_recording, is_capturing_stream, true};
#elif defined(EP_WITH_CUDA)
  return {make_gpu_recording, is_capturing_stream, false};
#else
  return {};
#endif
}

int raise_given(void* error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), static_cast<PyObject*>(error));
  Py_DECREF(static_cast<PyObject*>(error));
  return -1;
}

// In the main thread, when the operation is over. False: Python has no room for it.
bool raise_later() {
  PyObject *type = nullptr, *error = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(error, traceback);
  if (Py_AddPendingCall(&raise_given, error) == 0) {
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return true;
  }
  PyErr_Restore(type, error, traceback);
  return false;
}

// Gives lines to a function of Python. What it raises is shown as of a destructor, and ends nothing. What a handler of
// a signal raises amid it (Ctrl-C, the end of a server) is none of it, and is raised behind the operation.
class PythonRecorder : public Recorder {
 public:
  explicit PythonRecorder(py::object write) : Recorder(gpus()), write_(std::move(write)) {}

  // With the lock.
  Lost stop() {
    if (is_forked()) return {};
    Lines lines;
    {
      const LockRelease without_lock;
      lines = close();
    }
    if (!lines.empty()) give(lines);
    return lost();
  }

 private:
  // An error that the operation is about to raise is kept.
  void give(const Lines& lines) noexcept override {
    const LockHold lock;
    const py::error_scope kept;
    py::object result;
    try {
      py::list list;
      for (const auto& line : lines) {
        list.append(py::make_tuple(line->rank, line->shape.num_ranks, line->buffer, line->device(), line->text()));
      }
      result = py::reinterpret_steal<py::object>(call_python(write_.ptr(), list.ptr()));
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    if (result) return;
    const bool is_of_signal = PyErr_ExceptionMatches(PyExc_Exception) == 0;
    if (!is_of_signal || !raise_later()) PyErr_WriteUnraisable(write_.ptr());
  }

  const py::object write_;
};

PythonRecorder* current = nullptr;  // with the lock

}  // namespace

void define_observer(py::module_& m) {
  m.def(
      "start_recording",
      [](py::object write) {
        // Never freed: a call of another thread may be about to end.
        set_observer(current = new PythonRecorder(std::move(write)));
      },
      py::arg("write"),
      "Who is given the operations of this process from now on: lists of (rank, ranks, buffer, device, JSON).");
  m.def(
      "stop_recording",
      [] {
        set_observer(nullptr);
        PythonRecorder* const recorder = std::exchange(current, nullptr);
        const Recorder::Lost lost = recorder != nullptr ? recorder->stop() : Recorder::Lost();
        return py::make_tuple(lost.operations, lost.error);
      },
      "Gives the last ones. How many are lost, and why: of a GPU that has failed.");
}

}  // namespace ep
