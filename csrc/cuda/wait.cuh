// Waits with a deadline, and the one record of what ended a buffer.
#pragma once

#include "cuda/device_state.h"
#include "cuda/ptx.cuh"
#include "layout/ll_layout.h"

namespace ep {

// What a kernel knows of its call once it has read the epoch. One a block, in shared memory: it stays out of the
// registers, and slow paths take its address.
struct CallContext {
  DeviceState* state;
  const CallRecord* call;
  Kind kind;
  int rank;
  uint64_t epoch;
  uint32_t tag;
  int bank;

  // kOpen: the rest may be read. kFailed: the buffer had failed before; kFailedMeanwhile: it has failed in this very
  // call, in a block that came sooner.
  enum IsOpen : uint32_t { kClosed, kOpen, kFailed, kFailedMeanwhile };
  uint32_t is_open;
  mutable uint32_t has_given_up;  // high throughput: by a thread of the block, in a wait or over a record

  __device__ bool has_failed() const { return ptx::ld_relaxed_gpu(&state->fate.has_failed) != 0; }
};

// Never 0, and tells the calls of a buffer apart. (The host writes 1 when it gives up.)
__device__ __forceinline__ uint32_t failure_mark(const CallContext& context) {
  const uint32_t of_kind = static_cast<uint32_t>(context.kind) << 1 | (is_high_throughput(*context.call) ? 1 : 0);
  return static_cast<uint32_t>(context.epoch) << 3 | of_kind << 1 | 1;
}

// The first thread to fail fills the record; the code comes last, so that the host never reads half of it.
static __device__ __noinline__ void fail(const CallContext& context, Failure::Code code, Phase phase, int peer,
                                         uint64_t expected, uint64_t seen, const CallRecord& theirs) {
  context.has_given_up = 1;
  if (atomicExch(&context.state->fate.has_failed, failure_mark(context)) != 0) return;
  Failure* failure = context.state->failure;
  failure->kind = context.kind;
  failure->phase = phase;
  failure->peer = peer;
  failure->epoch = context.epoch;
  failure->expected = expected;
  failure->seen = seen;
  failure->missing = 0;
  failure->mine = *context.call;
  failure->theirs = theirs;
  failure->is_ht = is_high_throughput(*context.call) ? 1 : 0;
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(&failure->code) = code;
}

// Looks at the clock and at other waits' fate: the new start of the wait, or ~0 when it is over.
static __device__ __noinline__ uint64_t look_around(const CallContext& context, uint64_t start, Phase phase, int peer,
                                                    uint64_t expected, uint64_t seen) {
  if (context.has_failed()) {
    context.has_given_up = 1;
    return ~0ull;
  }
  const uint64_t now = ptx::global_timer_ns();
  if (start == 0) return now;
  // Read again each time: the host may have changed the deadline of a graph that is running.
  if (now - start < ptx::ld_relaxed_sys(&context.state->fate.timeout_ns)) return start;
  fail(context, Failure::kTimeout, phase, peer, expected, seen, CallRecord{});
  return ~0ull;
}

// Counts attempts, and looks around once in a while. `Time`: volatile keeps it in memory, where registers are few.
template <class Time>
class PatienceIn {
 public:
  // True: give up. The wait's owner must then leave its loop.
  __device__ __forceinline__ bool is_over(const CallContext& context, Phase phase, int peer, uint64_t expected,
                                          uint64_t seen) {
    return is_due() && look(context, phase, peer, expected, seen);
  }
  // The same in two steps, where it takes a while to say who is waited for.
  __device__ __forceinline__ bool is_due() { return (++attempts_ & 255) == 0; }
  __device__ __forceinline__ bool look(const CallContext& context, Phase phase, int peer, uint64_t expected,
                                       uint64_t seen) {
    const uint64_t start = look_around(context, start_, phase, peer, expected, seen);
    start_ = start;
    return start == ~0ull;
  }

 private:
  uint32_t attempts_ = 0;
  Time start_ = 0;
};
using Patience = PatienceIn<uint64_t>;
using LeanPatience = PatienceIn<volatile uint64_t>;

__device__ __forceinline__ bool is_tagged(uint64_t word, uint32_t tag) {
  return static_cast<uint32_t>(word >> 32) == tag;
}
__device__ __forceinline__ uint64_t tagged(uint32_t value, uint32_t tag) {
  return value | static_cast<uint64_t>(tag) << 32;
}

// Waits for one tagged word; its value, or 0 when the wait was given up.
__device__ __forceinline__ uint32_t await_word(const CallContext& context, const uint64_t* address, Phase phase,
                                               int peer) {
  Patience patience;
  uint64_t word = ptx::ld_relaxed_sys(address);
  while (!is_tagged(word, context.tag)) {
    if (patience.is_over(context, phase, peer, context.tag, word >> 32)) return 0;
    word = ptx::ld_relaxed_sys(address);
  }
  return static_cast<uint32_t>(word);
}

}  // namespace ep
