// Delay injection and planted bugs, in test builds only (EP_TESTING). In other builds every call compiles to nothing.
// The kernels use the same names (cuda/testing/testing.cuh, EP_LAB).
#pragma once

#include <cstdint>

namespace ep::testing {

// Mistakes that the test suite must notice. Tests switch one on and expect a failure.
enum class Bug : int {
  kNone = 0,
  kOneBank,           // both parities of the epoch use bank 0
  kSkippedReset,      // a reader leaves a row in its bank
  kReusedEpoch,       // an operation runs under the epoch of the one before
  kSignalBeforeData,  // a signal overtakes the puts it should follow
  kSecondSend,        // a second send leaves before the first was received
  kEarlyDone,         // high throughput: a reader signals that it has read before it has
  kEarlyRows,         // high throughput: rows are announced before the last of them is stored
  // On a GPU only.
  kIgnoredCredits,    // an operation stores into a bank before its owner has sent the credit
  kUncheckedHeaders,  // an operation ends although it has not seen the op headers of all ranks
  kEarlyEpoch,        // the first block of an operation advances the epoch, not the last
  kTornRows,          // a row counts as arrived when its first words have, or that of the first rank
  kUnannouncedRows,   // high throughput: rows are never announced
  // Between domains: a signal counts for both parities of the call, staging has one bank, a channel is not waited for,
  // a source changes before its put has landed, a channel is not forwarded, the first part of a channel to be done
  // sends all. High throughput: no chunk is put before all rows for the rail peers are there, which changes no result.
  // With masks: posts are not counted.
  kOneParity,
  kOneStagingBank,
  kSkippedWait,
  kEarlySource,
  kSkippedChunk,
  kEarlySlice,
  kLateChunks,
  kUncountedPosts,
  kNumBugs,
};

// Points of the protocol at which a rank may be delayed; on a GPU also one of its blocks or warps.
enum class Point : int {
  kBeforeHeader,
  kAfterHeader,
  kBetweenRows,
  kBeforeReset,
  kBeforeReceive,
  // On a GPU only.
  kBeforeOp,       // before the block reads the epoch
  kBeforeEpoch,    // before the epoch advances
  kBeforeCredits,  // before credits are sent
  kBeforeRouting,  // before routing is sent
  kBeforeRows,     // before the first row is sent
  kBetweenWords,   // between words of a row
  kBeforeTicket,   // before a sender draws a ticket for its next piece
};

#if defined(EP_TESTING)
void set_bug(Bug bug);
bool has_bug(Bug bug);
void set_delays(uint64_t seed);  // 0: none; otherwise some points stall for random times
void delay(Point point, int rank);
#else
inline constexpr bool has_bug(Bug) { return false; }
inline void delay(Point, int) {}
#endif

}  // namespace ep::testing
