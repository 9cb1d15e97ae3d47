// Waits for rows of a combine that another thread still writes.
#pragma once

#include <atomic>

#include "cpu/common/state.h"
#include "cpu/common/wait.h"
#include "runtime/common/row_signals.h"

namespace ep {

// Until the row may be read.
inline void await_row(const RowSignals& signals, int row, Deadline& deadline, CpuState& state, Transport& transport,
                      Kind kind, uint64_t epoch, const OpHeader& header, bool is_ht) {
  std::atomic_ref<uint32_t> counter(*const_cast<uint32_t*>(signals.counter_of(row)));
  uint32_t seen = 0;
  const Deadline::End end = deadline.wait_until([&] {
    seen = counter.load(std::memory_order_acquire);
    return signals.is_reached(seen);
  });
  if (end == Deadline::End::kReady) return;
  Failure failure;
  failure.kind = kind;
  failure.epoch = epoch;
  failure.mine = header;
  failure.is_ht = is_ht ? 1 : 0;
  failure.code = code_of(end);
  failure.awaited = Awaited::kRowSignal;
  failure.peer = signals.expert_of(row);
  failure.expected = signals.expected(row);
  failure.seen = seen;
  failure.waited_seconds = deadline.waited_seconds();
  fail(state, failure, transport);
}

}  // namespace ep
