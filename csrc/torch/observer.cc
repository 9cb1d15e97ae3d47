#include "torch/observer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <memory>
#include <utility>

#include "runtime/observed.h"
#include "torch/common/lock.h"

namespace py = pybind11;

namespace ep {
namespace {

// Of CLOCK_MONOTONIC, as Python's time.monotonic_ns().
int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

py::object ids_of(const Observation& seen) {
  if (seen.row_bytes == 0) return py::none();
  const at::Device device = seen.device_index < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, seen.device_index);
  const auto options = at::TensorOptions().dtype(seen.is_idx64 ? at::kLong : at::kInt).device(device);
  const int64_t sizes[] = {seen.num_tokens, seen.shape.topk};
  const at::Tensor ids = seen.num_tokens == 0 || seen.ids == nullptr
                             ? at::empty({0, seen.shape.topk}, options)
                             : at::from_blob(const_cast<void*>(seen.ids), sizes, options);
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(ids));
}

// Calls two functions of Python: on GPUs `begin(device, stream)`, then `end` with all that is known. What they raise is
// shown as of a destructor, and ends nothing.
class PythonObserver : public Observer {
 public:
  PythonObserver(py::object begin, py::object end) : begin_(std::move(begin)), end_(std::move(end)) {}

  void* begin(const Observation& seen) noexcept override {
    auto begun = std::make_unique<Begun>();
    if (seen.device_index >= 0) {
      const LockHold lock;
      begun->by_python =
          call(begin_, [&] { return py::make_tuple(seen.device_index, reinterpret_cast<uintptr_t>(seen.stream)); });
    }
    begun->ns = now_ns();
    return begun.release();
  }

  void end(const Observation& seen, void* given, bool has_failed) noexcept override {
    const std::unique_ptr<Begun> begun(static_cast<Begun*>(given));
    const int64_t end_ns = now_ns();
    const LockHold lock;
    call(end_, [&] {
      const py::object by_python = begun->by_python ? std::move(begun->by_python) : py::none();
      return py::make_tuple(py::dict(py::arg("buffer") = seen.buffer, py::arg("rank") = seen.rank,
                                     py::arg("num_ranks") = seen.shape.num_ranks, py::arg("operation") = seen.operation,
                                     py::arg("number") = seen.number, py::arg("begin_ns") = begun->ns,
                                     py::arg("end_ns") = end_ns, py::arg("tokens") = seen.num_tokens,
                                     py::arg("hidden") = seen.hidden, py::arg("topk") = seen.shape.topk,
                                     py::arg("experts") = seen.shape.num_experts, py::arg("row_bytes") = seen.row_bytes,
                                     py::arg("is_home_bound") = seen.is_home_bound, py::arg("has_failed") = has_failed),
                            has_failed ? py::none() : ids_of(seen), seen.has_row_per_choice, by_python);
    });
  }

 private:
  struct Begun {
    py::object by_python;
    int64_t ns = 0;
  };

  // With the lock. An error that the operation is about to raise is kept.
  template <class Make>
  static py::object call(const py::object& function, Make make) noexcept {
    const py::error_scope kept;
    py::object result;
    try {
      const py::object argument = make();
      result = py::reinterpret_steal<py::object>(call_python(function.ptr(), argument.ptr()));
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    if (!result) PyErr_WriteUnraisable(function.ptr());
    return result;
  }

  const py::object begin_, end_;
};

}  // namespace

void define_observer(py::module_& m) {
  m.def(
      "set_observer",
      [](py::object begin, py::object end) {
        // Never freed: a call of another thread may be about to end.
        set_observer(end.is_none() ? nullptr : new PythonObserver(std::move(begin), std::move(end)));
      },
      py::arg("begin") = py::none(), py::arg("end") = py::none(),
      "Who hears of each operation of this process, each with one tuple (csrc/torch/observer.cc); None: nobody.");
}

}  // namespace ep
