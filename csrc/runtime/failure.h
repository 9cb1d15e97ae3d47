// What a buffer remembers between operations. It lies where the backend works: host memory, or the GPU's, so that
// captured graphs advance it by themselves.
#pragma once

#include <cstdint>

#include "layout/common/rank_mask.h"
#include "layout/common/wire.h"

namespace ep {

// What a rank waits for.
enum class Awaited : uint32_t {
  kNone = 0,
  kOpHeader,
  kRouting,
  kWeights,
  kRows,
  kPartials,
  kScalars,
  kArrivalSignal,
  // High throughput.
  kReady,
  kRail,
  kDone,
  // Low latency: the own device has not written rows that are to be sent.
  kRowSignal
};

inline const char* name_of(Awaited awaited) {
  constexpr const char* kNames[] = {"nothing",
                                    "op header",
                                    "routing message",
                                    "weights",
                                    "token rows",
                                    "partial sums",
                                    "scalars of weights",
                                    "arrival signal",
                                    "rows to be read",
                                    "rows between domains",
                                    "end of reading",
                                    "signal"};
  return kNames[static_cast<int>(awaited)];
}

// The first thing that went wrong. A buffer that has failed stays failed.
struct Failure {
  // kHandle, of the CPU backend: its row `seen` of rank `peer`, which has `expected`, was found amid a call.
  // kOtherHandle: the own handle is of the dispatch of tag `expected`, that of `peer` of `seen`.
  // kDestroyed, of the CPU backend: another thread destroyed the buffer, so that this is in an error only.
  enum Code : uint32_t { kNone = 0, kTimeout, kOtherOp, kInterrupted, kHandle, kDestroyed, kOtherHandle };
  uint32_t code = kNone;
  Kind kind = Kind::kDispatch;
  Awaited awaited = Awaited::kNone;
  int32_t peer = -1;
  uint64_t epoch = 0;
  // Of the word waited for; kRowSignal: RowSignals::expected(), and `peer` is a local expert, -1 in packed.
  uint64_t expected = 0;
  uint64_t seen = 0;
  RankMask missing;  // nothing of the call was heard from them
  OpHeader mine, theirs;
  uint32_t is_ht = 0;         // the epoch counts calls of high throughput
  double waited_seconds = 0;  // kTimeout, if the timeout was changed while the call waited; CPU backend
};

// Expert ids outside [0, E) other than -1, since the last check.
struct InvalidIds {
  uint64_t count = 0;
  int64_t value = 0;  // the first one, and where it stood
  int32_t token = 0;
  int32_t k = 0;
};

struct Report {
  Failure failure;
  InvalidIds invalid_ids;
  uint64_t dropped_rows = 0;  // past a capacity, since the buffer was made
  uint64_t epochs[kNumKinds] = {0, 0};
  uint64_t ht_epochs[kNumKinds] = {0, 0};
  uint64_t ht_staged[kNumKinds] = {0, 0};  // calls of high throughput that copied for want of a place in the arena
  RankMask masked;
  RankMask left_out;  // by low latency: these, and those that count as active until the next operation
};

}  // namespace ep
