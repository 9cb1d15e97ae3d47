// Delay injection and planted bugs, in test builds only (EP_TESTING). In others every call folds to nothing. The names
// serve the kernels too (cuda/testing/testing.cuh, EP_GPU_TESTING).
#pragma once

#include <cstdint>

namespace ep::testing {

// Mistakes that the test suite must notice; tests switch one on and expect red.
enum class Bug : int {
  kNone = 0,
  kOneBank,           // both parities of the epoch use bank 0
  kSkippedReset,      // a reader leaves a row in its bank
  kReusedEpoch,       // a call runs under the epoch of the one before
  kSignalBeforeData,  // a signal overtakes the puts it should follow
  kSecondSend,        // a second send leaves before the first was received
  kEarlyDone,         // high throughput: a reader says that it has read before it has
  kEarlyRows,         // high throughput: rows are announced before the last of them is stored
  // On a GPU only.
  kIgnoredCredits,    // a call stores into a bank before its owner has said that the bank is empty
  kUncheckedHeaders,  // a call ends although it has not heard of all ranks
  kEarlyEpoch,        // the first block of a call moves the epoch on, not the last
  kTornRows,          // a row counts as arrived when its first words have, or that of the first rank
  kUnannouncedRows,   // high throughput: nobody hears that rows are there
  kNumBugs,
};

// Steps of the protocol at which a rank may be held up; on a GPU one of its blocks or warps, too.
enum class Point : int {
  kBeforeHeader,
  kAfterHeader,
  kBetweenRows,
  kBeforeReset,
  kBeforeReceive,
  // On a GPU only.
  kBeforeOp,       // before the block reads the epoch
  kBeforeEpoch,    // before the epoch moves on
  kBeforeCredits,  // before other ranks are told of empty banks
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
