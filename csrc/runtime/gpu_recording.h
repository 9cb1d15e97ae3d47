// The GPU's side of a recording: when operations begin and end on a GPU, and what they count. The host waits for none
// of it. csrc/cuda/host/gpu_recording.cc has it, tests one of their own.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "runtime/observed.h"

namespace ep {

// The host's clock, of CLOCK_MONOTONIC as Python's time.monotonic_ns().
inline int64_t host_clock_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

class GpuRecording {
 public:
  // An operation: words of the host's memory, into which kernels before and behind it write their times and counts.
  // They are made once, many at a time, and used again.
  struct Entry {
    virtual ~Entry() = default;
  };
  struct Times {
    int64_t begin_ns = 0;  // on the host's clock
    int64_t ns = 0;        // from there to the end
  };

  virtual ~GpuRecording() = default;

  // Before the operation. Any thread, as the next four.
  virtual Entry* begin(const Observation& operation) = 0;
  virtual RecordedWords words_of(const Entry& entry) = 0;
  // Behind it. Its rows are counted, and the choices of each expert, or not.
  virtual void end(Entry& entry, const Observation& operation, bool has_rows, bool has_choices) = 0;
  // Instead of end(): it is not known whether the operation's kernels run.
  virtual void fail(Entry& entry, const Observation& operation) = 0;
  // An entry that is done.
  virtual void give_back(Entry& entry) = 0;

  // All that was asked for has been written. wait() raises the error of a GPU that has failed.
  virtual bool is_done(const Entry& entry) = 0;
  virtual void wait(const Entry& entry) = 0;
  // Of one that has ended, and is done. One thread at a time.
  virtual Times times(const Entry& entry) = 0;
  // [R rows, E choices if they were wanted] in the lower halves. Null: nothing was counted.
  virtual const uint64_t* counts(const Entry& entry) = 0;
};

// Where operations run on GPUs.
struct RecordedGpus {
  std::function<std::unique_ptr<GpuRecording>(int device)> make;  // none: on the CPU alone
  std::function<bool(void* stream)> is_capturing;                 // nothing may be added to a graph
  bool are_cpus = false;                                          // the emulator: also those of ranks on the CPU
};

}  // namespace ep
