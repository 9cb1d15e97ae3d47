#include "torch/common/interruption.h"

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

#include "base/interruption.h"
#include "torch/common/lock.h"

namespace py = pybind11;

namespace ep {
namespace {

thread_local std::optional<py::error_already_set> raised;

// Handlers run in the main thread only, in others there is nothing to find.
bool has_raised() {
  if (is_interpreter_ending()) return false;  // whoever asks for the interpreter's lock then, never comes back
  const LockHold lock;
  if (PyErr_CheckSignals() == 0) return false;
  raised.emplace();
  return true;
}

}  // namespace

void watch_signals() { is_interrupted.store(&has_raised, std::memory_order_relaxed); }

void rethrow_interruption() {
  if (!raised) return;
  throw *std::exchange(raised, std::nullopt);
}

}  // namespace ep
