// The GPU's side of a recording (nccl_ep.record): when operations begin and end on a GPU, and what they count. The host
// waits for none of it. Free of CUDA's types, for those above.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/ht/observed_counts.h"

namespace ep {

class GpuRecording {
 public:
  // An operation: words of the host's memory, into which kernels before and behind it write their times and counts.
  // They are made once, many at a time, and used again.
  struct Entry;
  // Of an operation that is done.
  struct Times {
    int64_t begin_ns = 0;  // on the host's clock
    double us = 0;
  };

  static std::unique_ptr<GpuRecording> make(int device);
  virtual ~GpuRecording() = default;

  // Nothing may be added to a graph.
  static bool is_capturing(void* stream);

  // Before the operation, which has up to num_counts. Any thread.
  virtual Entry* begin(int num_counts, void* stream) = 0;
  // Behind it.
  virtual void end(Entry& entry, const ObservedCounts& counts, void* stream) = 0;
  // An entry that is done.
  virtual void give_back(Entry* entry) = 0;

  // All that was asked for has been written. wait() raises the error of a GPU that has failed.
  virtual bool is_done(const Entry& entry) = 0;
  virtual void wait(const Entry& entry) = 0;
  // Of one that has ended, and is done.
  virtual Times times(const Entry& entry) = 0;
  virtual const uint64_t* counts(const Entry& entry) = 0;  // null: nothing was counted
};

}  // namespace ep
