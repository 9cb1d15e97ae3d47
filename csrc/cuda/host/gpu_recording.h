// The GPU's side of a recording (nccl_ep.record): when operations begin and end on a GPU, and what they count. The host
// waits for none of it. Free of CUDA's types, for those above.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/ht/observed_counts.h"

namespace ep {

class GpuRecording {
 public:
  // An operation: two events, and words for its counts that the GPU writes into the host's memory. They are made once,
  // many at a time, and used again.
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

  // Before the operation. Any thread.
  virtual Entry* begin(void* stream) = 0;
  // Behind it: its end, and a kernel that counts, unless no rows travel (null).
  virtual void end(Entry& entry, const ObservedCounts* counts, void* stream) = 0;
  // An entry that nothing on the GPU uses.
  virtual void give_back(Entry* entry) = 0;

  // Of entries that have ended. Errors of a GPU are raised.
  virtual bool is_done(const Entry& entry) = 0;
  virtual void wait(const Entry& entry) = 0;
  // One thread at a time; best in the order of the operations, for a difference of near times is precise.
  virtual Times take_times(Entry& entry) = 0;
  // Of an entry that is done. Null: nothing was counted.
  virtual const uint64_t* words(const Entry& entry) = 0;
};

}  // namespace ep
