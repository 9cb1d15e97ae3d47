// A buffer's memory between operations, on the GPU: kernels read and advance it themselves, so a captured graph replays
// at any parity and obeys a deadline that is changed later.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/common/wire.h"
#include "layout/ht/offsets.h"
#include "layout/ll/rail.h"
#include "runtime/failure.h"

namespace ep {

// Words that many blocks access at once lie on lines of their own.
struct alignas(128) EpochLine {
  uint64_t epoch;  // of the last completed call
};
struct alignas(128) TicketLine {
  uint32_t started;  // blocks of the running call that have read the epoch
};

constexpr int kMaxTicketGroups = 64;  // counters of tickets that combine has

struct alignas(128) UnitTicketLine {
  // Zero between calls. Of a group of combine's sending blocks (WorkSchedule), or of tokens whose routing a dispatch
  // sends (LlDispatchGeometry).
  uint32_t next;
};

// What the blocks of one operation of high throughput count together. Two of each kind, by the parity of the epoch: an
// operation clears the counters of the next one.
struct HtCounters {
  alignas(128) uint32_t taken;  // units of work handed out to workers
  alignas(128) uint32_t finished;
  alignas(128) uint32_t staged;        // the same for rows that a rank copies (dispatch), makes readable (combine)
  alignas(128) uint32_t routes_taken;  // and for metadata
  alignas(128) uint32_t routes_finished;
  alignas(128) uint32_t ready[kMaxRanks * kHtChunks];  // rows of a chunk for a rank that lie in place
};

// Between domains, likewise.
struct HtRailCounters {
  alignas(128) uint32_t taken;                            // units that come from rail peers, or go to them
  alignas(128) uint32_t finished;                         // of them
  alignas(128) uint32_t places[kMaxRanks];                // dispatch: rows for each domain that have a place
  alignas(128) uint32_t done[kMaxRanks * kHtRailChunks];  // rows of a domain's chunk that lie in place
};

// How many parts of a row channel of a link are done (LlRail::parts), for the last one to send the rows. Each operation
// counts from `none_of` its epoch, so that nothing need be cleared, whatever an operation before has left behind.
struct RailSliceCounters {
  alignas(128) unsigned long long done[kMaxRanks * kRowChannels];

  EP_HD static unsigned long long none_of(uint64_t epoch) { return static_cast<unsigned long long>(epoch) << 16; }
  EP_HD unsigned long long* of(int link, int channel) { return done + link * kRowChannels + channel - 1; }
};

// Ranks that low latency leaves out, with masks. Read at the beginning of an operation, and in long waits.
struct Masks {
  // 0: the rank is active. kMasked; kRecalled: left out, but it counts as active until the next operation masks it
  // again (Backend::update_masks()). The lowest byte tells whether it counts as masked.
  static constexpr uint32_t kMasked = 0x101, kRecalled = 0x100;

  alignas(128) uint32_t is_masked[kMaxRanks];
  int num_ranks;
  uint64_t* headers[kNumKinds];  // in the own window, LlWindow's
  uint64_t stride;               // to the window of the next rank
  uint64_t* heartbeats;          // in the own window, LlWindow's
  // The ranks that a dispatch leaves out, in tagged words of a RankMask: the first block to know one decides for all.
  alignas(128) uint64_t consensus[RankMask::kWords];
  // When this rank sent its last heartbeat; of each rank the last one seen, and when it was seen.
  alignas(128) uint64_t heartbeat_sent_at;
  uint64_t heartbeat_seen[kMaxRanks], heartbeat_seen_at[kMaxRanks];

  // Which ranks make a block of a dispatch read the routing again: those of which it and the first block decided
  // differently, and those that it has left out since it opened, with `masked`, as it had begun to listen to them.
  EP_HD static uint32_t differences(uint32_t mine, uint32_t first, uint32_t masked) {
    return (mine ^ first) | (mine ^ masked);
  }

  // Of the op header from `source`.
  EP_HD uint64_t* mask_word(Kind kind, int bank, int source) const {
    return headers[static_cast<int>(kind)] + (bank * num_ranks + source) * OpHeader::kWords + OpHeader::kIsMasked;
  }
};

// Masks of ranks in other domains.
struct FarMasks {
  alignas(128) uint32_t is_told[kMaxRanks];  // that this rank masks it, since masks were cleaned
  uint64_t cleaned;                          // how often: a rank that masks this one has signalled it once more
};

struct DeviceState {
  EpochLine epoch[kNumKinds];
  TicketLine ticket[kNumKinds];
  UnitTicketLine unit_tickets[kMaxTicketGroups];
  UnitTicketLine routing_tickets;
  struct alignas(128) {
    uint32_t has_failed;  // 0, or failure_mark() of the call whose wait gave up; every wait polls it
    uint64_t timeout_ns;
  } failure_flag;
  struct alignas(128) {
    InvalidIds invalid_ids;
    uint64_t dropped_rows;
  } diagnostics;
  Masks masks;
  EpochLine ht_epoch[kNumKinds];
  TicketLine ht_ticket[kNumKinds];
  uint64_t ht_staged[kNumKinds];  // calls that copied for want of a place in the arena
  Failure* failure;               // pinned host memory, so that the host learns of it while the GPU is busy
  FarMasks far_masks;
  uint32_t* has_invalid_ids;  // as `failure`: set with the first of invalid_ids
  // From here on no report reads it (kReportedBytes).
  HtCounters ht_counters[kNumKinds][2];
  HtRailCounters ht_rail_counters[kNumKinds][2];
  RailSliceCounters rail_slices[kNumKinds];
};
constexpr size_t kReportedBytes = offsetof(DeviceState, ht_counters);

}  // namespace ep
