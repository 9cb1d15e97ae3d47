#include "torch/observer.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "runtime/observed.h"
#include "torch/common/lock.h"
#include "torch/recorded_line.h"

#if defined(EP_WITH_CUDA) || defined(EP_EMULATED_GPU)
#define EP_RECORDS_GPUS 1
#include "cuda/host/gpu_recording.h"
#endif

namespace py = pybind11;

namespace ep {
namespace {

// Of CLOCK_MONOTONIC, as Python's time.monotonic_ns().
int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What `close` says of operations whose GPU has failed.
struct Lost {
  int64_t operations = 0;
  std::string error;  // the first one
};

// Gives the lines of finished operations to a function of Python: of the CPU one by one, of a GPU many at a time, in
// the order of their calls. What it raises is shown as of a destructor, and ends nothing.
class Recorder : public Observer {
 public:
  explicit Recorder(py::object write) : write_(std::move(write)) {}

  void* begin([[maybe_unused]] const Observation& seen) noexcept override {
    if (is_forked()) return nullptr;  // a fork's operations are not recorded
    auto begun = std::make_unique<Begun>();
#if defined(EP_RECORDS_GPUS)
    if (is_on_gpu(seen)) begin_on_gpu(seen, *begun);
#endif
    begun->ns = now_ns();
    return begun.release();
  }

  void end(const Observation& seen, void* given, bool has_failed) noexcept override {
    const int64_t end_ns = now_ns();
    const std::unique_ptr<Begun> begun(static_cast<Begun*>(given));
    if (begun == nullptr) return;
    auto line = std::make_unique<RecordedLine>(seen, begun->ns, end_ns, has_failed);
#if defined(EP_RECORDS_GPUS)
    if (is_on_gpu(seen)) {
      end_on_gpu(seen, *begun, std::move(line));
      return;
    }
#endif
    if (line->can_have_rows()) line->count(seen);
    Lines lines;
    lines.push_back(std::move(line));
    deliver(lines);
  }

  // Gives what is left, for which it waits, once no operation has this observer any more from its beginning on. With
  // the lock.
  Lost close() {
#if defined(EP_RECORDS_GPUS)
    if (is_forked()) return {};
    Lines lines;
    {
      const LockRelease without_lock;
      lines = last_lines();
    }
    deliver(lines);
#endif
    return lost_;
  }

 private:
  using Lines = std::vector<std::unique_ptr<RecordedLine>>;

#if defined(EP_RECORDS_GPUS)
  static constexpr int kBatch = 64;

  struct Begun {
    int64_t ns = 0;
    bool is_captured = false;
    std::shared_ptr<GpuRecording> gpu;
    GpuRecording::Entry* entry = nullptr;
  };
  struct OnGpu {
    std::unique_ptr<RecordedLine> line;
    std::shared_ptr<GpuRecording> gpu;
    GpuRecording::Entry* entry;  // null: captured
  };

  static bool is_on_gpu([[maybe_unused]] const Observation& seen) {
#if defined(EP_EMULATED_GPU)
    return true;
#else
    return seen.device_index >= 0;
#endif
  }

  // No call of CUDA is made with the mutex (csrc/cuda/host/gpu_recording.cc).
  std::shared_ptr<GpuRecording> gpu_of(int device) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = gpus_.find(device); found != gpus_.end()) return found->second;
    }
    std::shared_ptr<GpuRecording> made = GpuRecording::make(device);
    const std::lock_guard lock(mutex_);
    return gpus_.emplace(device, std::move(made)).first->second;
  }

  void begin_on_gpu(const Observation& seen, Begun& begun) noexcept {
    try {
      begun.is_captured = GpuRecording::is_capturing(seen.stream);
      if (begun.is_captured) return;
      begun.gpu = gpu_of(seen.device_index);
      begun.entry = begun.gpu->begin(seen.shape.num_ranks + seen.shape.num_experts, seen.stream);
    } catch (const std::exception& error) {
      lose(1, error.what());
    }
  }

  void end_on_gpu(const Observation& seen, const Begun& begun, std::unique_ptr<RecordedLine> line) noexcept {
    line->is_captured = begun.is_captured;
    if (begun.entry == nullptr && !begun.is_captured) return;  // begin has failed
    if (!begin_to_end()) return leave(begun);
    OnGpu operation{std::move(line), begun.gpu, begun.entry};
    bool is_recorded = true;
    if (begun.entry != nullptr && !operation.line->has_failed) {
      try {
        end_entry(seen, *operation.line, begun);
      } catch (const std::exception& error) {
        lose(1, error.what());
        is_recorded = false;
      }
    }
    bool is_batch = false;
    {
      const std::lock_guard lock(mutex_);
      num_ending_--;
      if (is_recorded) ended_[seen.device_index].push_back(std::move(operation));
      is_batch = ++num_since_batch_ >= kBatch && !begun.is_captured;
    }
    changed_.notify_all();
    if (is_batch || seen.device_index < 0) give_what_is_done();
  }

  bool begin_to_end() {
    const std::lock_guard lock(mutex_);
    if (!is_closed_) num_ending_++;
    return !is_closed_;
  }
  // Of an operation that the recording does not see end. Its GPU must have done with the entry, which goes.
  static void leave(const Begun& begun) noexcept {
    try {
      if (begun.entry != nullptr) begun.gpu->wait(*begun.entry);
    } catch (const std::exception&) {
    }
  }
  static void end_entry(const Observation& seen, const RecordedLine& line, const Begun& begun) {
    const ObservedCounts counts{.ids = seen.ids,
                                .is_idx64 = seen.is_idx64,
                                .num_tokens = seen.num_tokens,
                                .shape = seen.shape,
                                .has_row_per_choice = seen.has_row_per_choice,
                                .has_choices = line.has_choices() && seen.rows == nullptr,
                                .rows = seen.rows,
                                .has_rows = line.can_have_rows()};
    begun.gpu->end(*begun.entry, counts, seen.stream);
  }

  // One thread at a time: others leave theirs to it, or to the next batch.
  void give_what_is_done() noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (is_giving_ || is_closed_) return;
      is_giving_ = true;
      num_since_batch_ = 0;
      take_ended();
    }
    deliver(finished(false));
    {
      const std::lock_guard lock(mutex_);
      is_giving_ = false;
    }
    changed_.notify_all();
  }

  Lines last_lines() {
    {
      std::unique_lock lock(mutex_);
      is_closed_ = true;
      changed_.wait(lock, [this] { return !is_giving_ && num_ending_ == 0; });
      take_ended();
    }
    Lines lines = finished(true);
    for (const auto& [device, rest] : taken_) lost_.operations += static_cast<int64_t>(rest.size());
    taken_.clear();
    std::map<int, std::shared_ptr<GpuRecording>> gpus;
    const std::lock_guard lock(mutex_);
    gpus.swap(gpus_);
    return lines;
  }

  // With the mutex.
  void take_ended() {
    for (auto& [device, operations] : ended_) {
      for (OnGpu& operation : operations) taken_[device].push_back(std::move(operation));
      operations.clear();
    }
  }

  // What a GPU has done, in order: one that is not done keeps those behind it.
  Lines finished(bool waits) noexcept {
    Lines lines;
    for (auto& [device, operations] : taken_) {
      try {
        while (!operations.empty() && is_done(operations.front(), waits)) {
          finish(operations.front());
          lines.push_back(std::move(operations.front().line));
          operations.pop_front();
        }
      } catch (const std::exception& error) {
        lose(0, error.what());
      }
    }
    return lines;
  }
  static bool is_done(const OnGpu& operation, bool waits) {
    if (operation.entry == nullptr) return true;
    if (waits) operation.gpu->wait(*operation.entry);
    return waits || operation.gpu->is_done(*operation.entry);
  }
  static void finish(const OnGpu& operation) {
    RecordedLine& line = *operation.line;
    if (operation.entry == nullptr) return;
    if (!line.has_failed) {
      const GpuRecording::Times times = operation.gpu->times(*operation.entry);
      line.has_times = line.device_index >= 0;
      line.device_begin_ns = times.begin_ns;
      line.device_us = times.us;
      if (const uint64_t* counts = operation.gpu->counts(*operation.entry)) line.take(counts);
    }
    operation.gpu->give_back(operation.entry);
  }

  void lose(int operations, const char* error) noexcept {
    const std::lock_guard lock(mutex_);
    lost_.operations += operations;
    if (lost_.error.empty()) lost_.error = error;
  }

  std::mutex mutex_;  // of all but taken_
  std::condition_variable changed_;
  std::map<int, std::shared_ptr<GpuRecording>> gpus_;
  std::map<int, std::deque<OnGpu>> ended_;  // by GPUs, in order
  std::map<int, std::deque<OnGpu>> taken_;  // the next of them, of the thread that gives what is done
  int num_since_batch_ = 0, num_ending_ = 0;
  bool is_giving_ = false, is_closed_ = false;
#else
  struct Begun {
    int64_t ns = 0;
  };
#endif

  bool is_forked() const { return num_forks() != forks_; }

  // An error that the operation is about to raise is kept.
  void deliver(const Lines& lines) noexcept {
    if (lines.empty()) return;
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
    if (!result) PyErr_WriteUnraisable(write_.ptr());
  }

  const py::object write_;
  const int forks_ = num_forks();
  Lost lost_;
};

Recorder* current = nullptr;  // with the lock

}  // namespace

void define_observer(py::module_& m) {
  m.def(
      "start_recording",
      [](py::object write) { set_observer(current = new Recorder(std::move(write))); },  // never freed: see Observer
      py::arg("write"),
      "Who is given the operations of this process from now on: lists of (rank, ranks, buffer, device, JSON).");
  m.def(
      "stop_recording",
      [] {
        set_observer(nullptr);
        Recorder* const recorder = std::exchange(current, nullptr);
        const Lost lost = recorder != nullptr ? recorder->close() : Lost();
        return py::make_tuple(lost.operations, lost.error);
      },
      "Gives the last ones. How many are lost, and why: of a GPU that has failed.");
}

}  // namespace ep
