#include "torch/observer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

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

py::list list_of(const std::vector<int32_t>& values) {
  py::list list;
  for (int32_t value : values) list.append(value);
  return list;
}

// Rows to or from each rank [R], and, of a dispatch, the choices of each expert [E]: of an operation on the CPU, into
// the line of the file.
void count(const Observation& seen, py::dict& line) {
  const auto ranks = static_cast<size_t>(seen.shape.num_ranks);
  if (seen.rows != nullptr) {
    line["rows"] = list_of({seen.rows, seen.rows + ranks});
    return;
  }
  const auto experts = static_cast<size_t>(seen.shape.num_experts);
  std::vector<int32_t> rows(ranks), choices(experts), owners(experts), last(ranks, -1);
  for (size_t i = 0; i < experts; i++) owners[i] = seen.shape.owner(static_cast<int>(i));
  int64_t at = 0;
  for (int token = 0; token < seen.num_tokens; token++) {
    for (int k = 0; k < seen.shape.topk; k++, at++) {
      const int64_t id =
          seen.is_idx64 ? static_cast<const int64_t*>(seen.ids)[at] : static_cast<const int32_t*>(seen.ids)[at];
      if (!seen.shape.valid(id)) continue;
      const auto expert = static_cast<size_t>(id);
      const auto owner = static_cast<size_t>(owners[expert]);
      choices[expert]++;
      rows[owner] += seen.has_row_per_choice || last[owner] != token ? 1 : 0;
      last[owner] = token;
    }
  }
  line["rows"] = list_of(rows);
  if (!seen.is_home_bound) line["choices"] = list_of(choices);
}

// The same of an operation on a GPU, for Python: a tensor over what it is counted of.
py::object view(const Observation& seen, const void* data, at::IntArrayRef sizes, at::ScalarType type) {
  const auto options = at::TensorOptions().dtype(type).device(at::Device(at::kCUDA, seen.device_index));
  const bool is_empty = data == nullptr || sizes[0] == 0;
  at::Tensor tensor = is_empty ? at::empty(sizes, options) : at::from_blob(const_cast<void*>(data), sizes, options);
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

// Calls two functions of Python: `end` with what is known of the operation; on GPUs before it `begin(device, stream)`,
// whose result `end` gets, with rows [R] or ids [T, K], and whether each choice is a row. What they raise is shown as
// of a destructor, and ends nothing.
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
    const int64_t end_ns = now_ns();
    const LockHold lock;
    const std::unique_ptr<Begun> begun(static_cast<Begun*>(given));  // gone before the lock, which its object needs
    call(end_, [&]() -> py::tuple {
      py::dict line(py::arg("buffer") = seen.buffer, py::arg("rank") = seen.rank,
                    py::arg("num_ranks") = seen.shape.num_ranks, py::arg("operation") = seen.operation,
                    py::arg("number") = seen.number, py::arg("begin_ns") = begun->ns, py::arg("end_ns") = end_ns,
                    py::arg("tokens") = seen.num_tokens, py::arg("hidden") = seen.hidden,
                    py::arg("topk") = seen.shape.topk, py::arg("experts") = seen.shape.num_experts,
                    py::arg("row_bytes") = seen.row_bytes, py::arg("is_home_bound") = seen.is_home_bound);
      if (has_failed) line["has_failed"] = true;
      const bool has_rows = seen.row_bytes > 0 && !has_failed;
      if (seen.device_index < 0) {
        if (has_rows) count(seen, line);
        return py::make_tuple(line);
      }
      py::object by_python = py::none(), rows = py::none(), ids = py::none();
      if (begun->by_python) by_python = begun->by_python;
      if (has_rows && seen.rows != nullptr) rows = view(seen, seen.rows, {seen.shape.num_ranks}, at::kInt);
      if (has_rows && seen.rows == nullptr) {
        ids = view(seen, seen.ids, {seen.num_tokens, seen.shape.topk}, seen.is_idx64 ? at::kLong : at::kInt);
      }
      return py::make_tuple(line, by_python, rows, ids, seen.has_row_per_choice);
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
