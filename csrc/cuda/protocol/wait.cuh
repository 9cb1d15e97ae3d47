// Waits with a deadline, and the record of the failure that ended a buffer.
#pragma once

#include <cstddef>

#include "cuda/device/kernel_set.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/protocol/device_state.h"
#include "cuda/testing/testing.cuh"
#include "layout/ll/offsets.h"

namespace ep {

struct LlRail;

inline namespace EP_KERNELS {

// What a block knows of its operation once it has read the epoch. It lies in shared memory: most of it stays out of the
// registers, and slow paths take its address.
struct OpContext {
  DeviceState* state;
  const OpHeader* header;
  Kind kind;
  int rank;
  uint64_t epoch;

  // kOpen: the rest may be read. kFailed: the buffer had failed before. kFailedMeanwhile: it has failed in this very
  // operation, in a block that came sooner.
  enum IsOpen : uint16_t { kClosed, kOpen, kFailed, kFailedMeanwhile };
  // These three are one word, so that in low latency a warp that waits for the operation to open gets all three.
  alignas(8) uint32_t tag;
  uint16_t bank, is_open;
  mutable uint32_t
      has_given_up;  // high throughput: a thread of the block has given up a wait, or seen another op header

  // kMasksRanks, words of a RankMask: the ranks that are masked when the operation opens, and whether there are any;
  // the sources that a dispatch leaves out, those that had masked this rank when its block began to wait
  // (ll/dispatch/mask_consensus.cuh), and not 0 if the block must read the routing again.
  static constexpr int kMaskWords = kMasksRanks ? RankMask::kWords : 1;
  uint32_t masked[kMaskWords], are_any_masked;
  mutable uint32_t left_out[kMaskWords], has_told[kMaskWords], listens_again;
  // kMasksFarRanks: what leads to ranks of other domains (FarRanks).
  const LlRail* rail;
  const void* network;

  __device__ bool has_failed() const { return ptx::ld_relaxed_gpu(&state->failure_flag.has_failed) != 0; }
};

// The word of tag, bank and is_open.
struct OpenWord {
  static_assert(offsetof(OpContext, tag) % sizeof(uint64_t) == 0 &&
                offsetof(OpContext, bank) == offsetof(OpContext, tag) + 4 &&
                offsetof(OpContext, is_open) == offsetof(OpContext, tag) + 6);
  uint64_t value;

  __device__ __forceinline__ static OpenWord of(uint32_t tag, int bank, OpContext::IsOpen is_open) {
    return {static_cast<uint64_t>(is_open) << 48 | static_cast<uint64_t>(bank) << 32 | tag};
  }
  __device__ __forceinline__ uint32_t tag() const { return static_cast<uint32_t>(value); }
  __device__ __forceinline__ int bank() const { return static_cast<int>(value >> 32 & 0xFFFF); }
  __device__ __forceinline__ uint32_t is_open() const { return static_cast<uint32_t>(value >> 48); }
};

// An operation as a warp knows it: what it needs at every turn is in registers once the epoch is known.
struct WarpContext {
  const OpContext& context;
  uint32_t tag = 0;
  int bank = 0;

  // Of an operation that is open.
  __device__ __forceinline__ explicit WarpContext(const OpContext& context)
      : context(context), tag(context.tag), bank(context.bank) {}
  __device__ __forceinline__ operator const OpContext&() const { return context; }

  struct NotYet {};
  __device__ __forceinline__ WarpContext(const OpContext& context, NotYet) : context(context) {}
  __device__ __forceinline__ void open(OpenWord word) {
    tag = word.tag();
    bank = word.bank();
  }
};

__device__ __forceinline__ void testing_point(Point point, const WarpContext& op) { testing_point(point, op.context); }
__device__ __forceinline__ void testing_point(Point point, const WarpContext& op, int number) {
  testing_point(point, op.context, number);
}

// Never 0, and different for each operation of a buffer. (The host writes 1 when it gives up.)
__device__ __forceinline__ uint32_t failure_mark(const OpContext& context) {
  const uint32_t of_kind = static_cast<uint32_t>(context.kind) << 1 | (is_high_throughput(*context.header) ? 1 : 0);
  return static_cast<uint32_t>(context.epoch) << 3 | of_kind << 1 | 1;
}

// The first thread to fail fills the record; the code comes last, so that the host never reads half of it.
static __device__ __noinline__ void fail(const OpContext& context, Failure::Code code, Awaited awaited, int peer,
                                         uint64_t expected, uint64_t seen, const OpHeader& theirs) {
  context.has_given_up = 1;
  if (atomicExch(&context.state->failure_flag.has_failed, failure_mark(context)) != 0) return;
  Failure* failure = context.state->failure;
  failure->kind = context.kind;
  failure->awaited = awaited;
  failure->peer = peer;
  failure->epoch = context.epoch;
  failure->expected = expected;
  failure->seen = seen;
  failure->mine = *context.header;
  failure->theirs = theirs;
  failure->is_ht = is_high_throughput(*context.header) ? 1 : 0;
  __threadfence_system();
  *reinterpret_cast<volatile uint32_t*>(&failure->code) = code;
}

// ---- Masks of ranks

// Of an operation that is open.
__device__ __forceinline__ bool is_masked(const OpContext& context, int rank) {
  return kMasksRanks && (context.masked[RankMask::word_of(rank)] & RankMask::bit_of(rank)) != 0;
}

// Ranks of other domains, which stores do not reach. Of kernels that mask ranks and cross domains
// (ll/common/far_ranks.cuh).
struct FarRanks {
  __device__ static bool has(const OpContext& context, int rank);
  // Tells the peer that this rank masks it; once, until masks are cleaned.
  __device__ static void tell_mask(const OpContext& context, int peer);
  // Whether the peer masks this rank.
  __device__ static bool is_masked_by(const OpContext& context, int peer);
  __device__ static void send_heartbeat(const OpContext& context, int peer);
  __device__ static uint64_t heartbeat(const OpContext& context, int peer);
};
__device__ __forceinline__ bool is_far(const OpContext& context, int rank) {
  if constexpr (kMasksFarRanks) return FarRanks::has(context, rank);
  return false;
}

// The same as it is now: late in an operation, when a rank may have been masked meanwhile.
__device__ __forceinline__ bool is_masked_now(const OpContext& context, int rank) {
  return kMasksRanks && ptx::ld_relaxed_gpu(&context.state->masks.is_masked[rank]) != 0;
}
// At the beginning of an operation: a rank that is left out and counts as active has not come back.
__device__ __forceinline__ void mask_recalled(const OpContext& context, int rank) {
  if (rank >= context.state->masks.num_ranks) return;
  uint32_t& word = context.state->masks.is_masked[rank];
  if (ptx::ld_relaxed_gpu(&word) == Masks::kRecalled) ptx::st_relaxed_gpu(&word, Masks::kMasked);
}
// Whether a wait for `peer` is over because low latency leaves it out: it is masked, or has masked this rank, in this
// operation or, if this rank is behind, in a later one.
static __device__ __noinline__ bool is_left_out(const OpContext& context, int peer) {
  Masks& masks = context.state->masks;
  if (ptx::ld_relaxed_gpu(&masks.is_masked[peer]) != 0) return true;
  if constexpr (kMasksFarRanks) {
    if (is_far(context, peer)) {
      if (!FarRanks::is_masked_by(context, peer)) return false;
      ptx::st_relaxed_gpu(&masks.is_masked[peer], Masks::kMasked);
      return true;
    }
  }
  for (int bank = 0; bank < kNumBanks; bank++) {
    const uint64_t word = ptx::ld_relaxed_sys(masks.mask_word(context.kind, bank, peer));
    const auto tag = static_cast<uint32_t>(word >> 32);
    if (static_cast<uint32_t>(word) != 1 || !is_not_before(tag, tag_of(context.epoch))) continue;
    ptx::st_relaxed_gpu(&masks.is_masked[peer], Masks::kMasked);
    return true;
  }
  return false;
}

// Stores `value` in the peer's window, at the place that `word` has in the own one.
__device__ __forceinline__ void tell(const OpContext& context, uint64_t* word, int peer, uint64_t value) {
  char* there =
      reinterpret_cast<char*>(word) + (peer - context.rank) * static_cast<int64_t>(context.state->masks.stride);
  ptx::st_relaxed_sys(reinterpret_cast<uint64_t*>(there), value);
}

// Masks `peer`, which may be in this operation or behind it, and tells it. What the peer still waits for does not come:
// neither in this kind of operation nor in one of the other kind, on another stream, which drops what is for it from
// now on.
static __device__ __noinline__ void mask_late(const OpContext& context, int peer) {
  Masks& masks = context.state->masks;
  ptx::st_relaxed_gpu(&masks.is_masked[peer], Masks::kMasked);
  __threadfence();
  if constexpr (kMasksFarRanks) {
    if (is_far(context, peer)) return FarRanks::tell_mask(context, peer);
  }
  for (int k = 0; k < kNumKinds; k++) {
    const auto kind = static_cast<Kind>(k);
    const uint64_t last_epoch = ptx::ld_relaxed_gpu(&context.state->epoch[k].epoch);
    const uint64_t epoch = kind == context.kind ? context.epoch : last_epoch + 1;
    tell(context, masks.mask_word(kind, bank_of(epoch), context.rank), peer,
         1 | static_cast<uint64_t>(tag_of(epoch)) << 32);
  }
}

// When the last heartbeat of `peer` was seen here.
__device__ __forceinline__ uint64_t last_heartbeat(const OpContext& context, int peer, uint64_t now) {
  Masks& masks = context.state->masks;
  uint64_t sign;
  if constexpr (kMasksFarRanks) {
    sign = is_far(context, peer) ? FarRanks::heartbeat(context, peer) : ptx::ld_relaxed_sys(masks.heartbeats + peer);
  } else {
    sign = ptx::ld_relaxed_sys(masks.heartbeats + peer);
  }
  if (sign == ptx::ld_relaxed_gpu(&masks.heartbeat_seen[peer]))
    return ptx::ld_relaxed_gpu(&masks.heartbeat_seen_at[peer]);
  ptx::st_relaxed_gpu(&masks.heartbeat_seen_at[peer], now);
  ptx::st_relaxed_gpu(&masks.heartbeat_seen[peer], sign);
  return now;
}

// Sends a heartbeat to all ranks, now and then, and notes theirs.
__device__ __forceinline__ void send_heartbeat(const OpContext& context, uint64_t now, uint64_t timeout_ns) {
  Masks& masks = context.state->masks;
  const uint64_t given_at = ptx::ld_relaxed_gpu(&masks.heartbeat_sent_at);
  if (now < given_at + timeout_ns / kHeartbeatsPerDeadline) return;
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&masks.heartbeat_sent_at), given_at, now) != given_at) return;
#pragma unroll 1
  for (int peer = 0; peer < masks.num_ranks; peer++) {
    if (!is_far(context, peer)) {
      tell(context, masks.heartbeats + context.rank, peer, now);
    } else if constexpr (kMasksFarRanks) {
      if (!is_masked_now(context, peer)) FarRanks::send_heartbeat(context, peer);
    }
    last_heartbeat(context, peer, now);
  }
}

// Waits of a rank that still has to send. No rank may be late because another one is: with masks these waits are
// shorter, and an operation has two at most.
__device__ __forceinline__ bool holds_up_sends(const OpContext& context, Awaited awaited) {
  return awaited == Awaited::kArrivalSignal || (awaited == Awaited::kWeights && context.kind == Kind::kCombine);
}

// Polls the clock and the failure flag. Returns the start of the wait, with kWaitIsOver when it is over: then the
// buffer has failed, or the peer is masked.
constexpr uint64_t kWaitIsOver = kMasksRanks ? 1ull << 63 : ~0ull;
static __device__ __noinline__ uint64_t poll_deadline(const OpContext& context, uint64_t start, Awaited awaited,
                                                      int peer, uint64_t expected, uint64_t seen) {
  if (context.has_failed()) {
    context.has_given_up = 1;
    return kWaitIsOver;
  }
  if (kMasksRanks && is_left_out(context, peer)) return start | kWaitIsOver;
  const uint64_t now = ptx::global_timer_ns();
  if (start == 0) return now;
  // Read again each time: the host may have changed the deadline of a graph that is running.
  const uint64_t timeout_ns = ptx::ld_relaxed_sys(&context.state->failure_flag.timeout_ns);
  uint64_t limit = kMasksRanks && holds_up_sends(context, awaited) ? timeout_ns / 4 : timeout_ns;
  // What waits for such a row began at about the same time, and is not what is to be named.
  if (awaited == Awaited::kRowSignal) limit -= limit / 8;
  if (kMasksRanks && peer != context.rank) {
    send_heartbeat(context, now, timeout_ns);
    const uint64_t lived_at = last_heartbeat(context, peer, now);
    if (now - start < kMaxDeadlines * limit && now < lived_at + limit) return start;
  }
  if (now - start < limit) return start;
  // The own sending warps may wait for one late rank after the other.
  if (kMasksFarRanks && peer == context.rank && now - start < kMaxDeadlines * limit) return start;
  if (kMasksRanks && peer != context.rank) {
    mask_late(context, peer);
  } else {
    fail(context, Failure::kTimeout, awaited, peer, expected, seen, OpHeader{});
  }
  return start | kWaitIsOver;
}

// Counts polls, and checks deadline and failure flag once in a while. `Time`: volatile keeps it in memory, where
// registers are few. With masks, waits that follow one another share one budget, so that they end by one deadline.
template <class Time>
class WaitBudgetIn {
 public:
  // True: give up. The wait's owner must then leave its loop; if the buffer has not failed, the peer is masked.
  __device__ __forceinline__ bool is_spent(const OpContext& context, Awaited awaited, int peer, uint64_t expected,
                                           uint64_t seen) {
    return is_due() && poll(context, awaited, peer, expected, seen);
  }
  // The same in two steps, for waits that need time to find out which rank they wait for.
  __device__ __forceinline__ bool is_due() { return (++attempts_ & 255) == 0; }
  __device__ __forceinline__ bool poll(const OpContext& context, Awaited awaited, int peer, uint64_t expected,
                                       uint64_t seen) {
    const uint64_t start = poll_deadline(context, start_, awaited, peer, expected, seen);
    start_ = kMasksRanks ? start & ~kWaitIsOver : start;
    return (start & kWaitIsOver) == kWaitIsOver;
  }

 private:
  uint32_t attempts_ = 0;
  Time start_ = 0;
};
using WaitBudget = WaitBudgetIn<uint64_t>;
using LeanWaitBudget = WaitBudgetIn<volatile uint64_t>;

__device__ __forceinline__ bool is_tagged(uint64_t word, uint32_t tag) {
  return static_cast<uint32_t>(word >> 32) == tag;
}
__device__ __forceinline__ uint64_t tagged(uint32_t value, uint32_t tag) {
  return value | static_cast<uint64_t>(tag) << 32;
}

// Waits for one tagged word; its value, or 0 when the wait was given up.
__device__ __forceinline__ uint32_t await_word(const WarpContext& op, const uint64_t* address, Awaited awaited,
                                               int peer) {
  WaitBudget budget;
  uint64_t word = ptx::ld_relaxed_sys(address);
  while (!is_tagged(word, op.tag)) {
    if (budget.is_spent(op, awaited, peer, op.tag, word >> 32)) return 0;
    word = ptx::ld_relaxed_sys(address);
  }
  return static_cast<uint32_t>(word);
}

}  // namespace EP_KERNELS
}  // namespace ep
