// What a rank of the host keeps between operations.
#pragma once

#include <cstdint>
#include <mutex>

#include "cpu/common/heartbeats.h"
#include "cpu/common/next_calls.h"
#include "cpu/common/wait.h"
#include "layout/ht/offsets.h"
#include "layout/ll/offsets.h"
#include "runtime/backend.h"
#include "transport/transport.h"

namespace ep {

// How the buffer failed. Another thread may ask while a call gives up.
class FailureCell {
 public:
  void set(const Failure& failure) {
    std::lock_guard lock(mutex_);
    failure_ = failure;
  }
  bool is_set() const {
    std::lock_guard lock(mutex_);
    return failure_.code != Failure::kNone;
  }
  Failure get() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  mutable std::mutex mutex_;
  Failure failure_;
};

struct CpuState {
  uint64_t epoch[kNumKinds] = {0, 0};     // of the last completed call
  uint64_t arrivals[kNumKinds] = {0, 0};  // arrival signals that every network peer has sent up to that call
  WaitControl control;
  FailureCell failure;
  bool masks_late = false;  // a rank that misses a deadline of low latency is masked
  RankMask masked;          // those that are
  RankMask recalled;        // of them those that count as active until the next operation (Backend::update_masks())
  Heartbeats heartbeats;
  Offset heartbeats_at = 0;  // in every window
  NextCalls next_calls;
  InvalidIds invalid_ids;
  uint64_t dropped_rows = 0;
  WireBytes wire;
  // High throughput.
  uint64_t ht_epoch[kNumKinds] = {0, 0};
  uint64_t ht_sent[kNumHtSignals] = {};  // value that each signal has at its readers: all are sent it at the same time
  uint64_t ht_staged[kNumKinds] = {0, 0};
};

Failure::Code code_of(Deadline::End end);
// The buffer has failed, which the error tells.
[[noreturn]] void fail(CpuState& state, const Failure& failure, const Transport& transport);

}  // namespace ep
