// A buffer's memory between operations, on the GPU: kernels read and advance it themselves, so a captured graph replays
// at any parity and obeys a deadline that is changed later.
#pragma once

#include <cstdint>

#include "cuda/geometry.h"
#include "layout/wire.h"
#include "runtime/state.h"

namespace ep {

// Words that different blocks hammer lie on lines of their own.
struct alignas(128) EpochLine {
  uint64_t epoch;  // of the last completed call
};
struct alignas(128) TicketLine {
  uint32_t started;  // blocks of the running call that have read the epoch
};

struct alignas(128) WorkLine {
  uint32_t ticket;  // the next one of a group of blocks; zero between calls (UnitDeal)
};

struct DeviceState {
  EpochLine epoch[kNumKinds];
  TicketLine ticket[kNumKinds];
  WorkLine work[kMaxTicketGroups];  // of combine's senders
  struct alignas(128) {
    uint32_t has_failed;  // set once, by the first wait that gives up; every wait looks at it
    uint64_t timeout_ns;
  } fate;
  struct alignas(128) {
    InvalidIds invalid_ids;
    uint64_t dropped_rows;
  } found;
  Failure* failure;  // pinned host memory, so that the host learns of it while the GPU is busy
};

}  // namespace ep
