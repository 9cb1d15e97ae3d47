// One operation's view of the wire on the host: tagged words and rows, in band to ranks of the own domain, by puts and
// one arrival signal to the others. Throws kTimeout or kMismatch and leaves the reason in the state, or masks the rank.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "cpu/common/state.h"
#include "cpu/common/wait.h"
#include "layout/ll/offsets.h"
#include "runtime/backend.h"
#include "transport/transport.h"

namespace ep {

class Exchange {
 public:
  // `given_dispatch`: of the handle that the operation was given; null: it makes one.
  Exchange(Transport& transport, CpuState& state, Kind kind, const LlOffsets& offsets, const OpHeader& header,
           const int32_t* given_dispatch);
  ~Exchange();  // an operation that fails halfway leaves puts behind, which read its sources
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int rank() const { return transport_.rank(); }
  int num_ranks() const { return offsets_.num_ranks; }
  uint32_t tag() const { return tag_; }

  // ---- Sending. Each rank begins with itself, so that not all begin with the same peer.
  int peer(int step) const { return (rank() + step) % num_ranks(); }
  // Only word kIsMasked of op headers goes to a masked rank, and nothing is taken from it.
  bool is_masked(int rank) const { return state_.masked.has(rank); }
  void send_header(int peer);
  void send_words(int peer, Offset offset, const uint32_t* values, int count);
  // A tagged word for this rank's own receive.
  void keep_word(Offset offset, uint32_t value);
  // A row of the own token `token` (dispatch), or of a partial sum for the peer's token (combine).
  void send_row(int peer, int token, const uint32_t* words, int num_words) {
    send_row_to(peer, offsets_.row(bank_, rank(), token), words, num_words);
  }
  void send_row_to(int peer, Offset slot, const uint32_t* words, int num_words);
  // When the peers' await_arrivals() returns, everything sent so far is there. Sources may be reused.
  void close_stage();

  // ---- Receiving.
  // Waits for the op header of every rank and compares it with the own one.
  void await_headers();
  int num_tokens(int source) const { return static_cast<int>(headers_[source].word(OpHeader::kNumTokens)); }
  // Waits until the own device has written a row that is to be sent.
  void await_signal(const RowSignals& signals, int row);
  // False, with zeros: the source is masked.
  bool await_words(int source, Offset offset, Awaited awaited, uint32_t* values, int count);
  // Takes a row out of its slot and resets the slot. False, with zeros: the source is masked.
  bool take_row(int source, int token, Awaited awaited, uint32_t* words, int num_words) {
    return take_row_from(source, offsets_.row(bank_, source, token), token, awaited, words, num_words);
  }
  bool take_row_from(int source, Offset slot, int token, Awaited awaited, uint32_t* words, int num_words);
  // Network peers: the next stage of the call has arrived.
  void await_arrivals();

  // Called when nothing is left to send. With masks, a rank that still has to send waits half as long, so that no rank
  // is late because another one is.
  void begin_receiving() { deadline_ = Deadline(state_.control); }
  // The operation is over: advances the epoch.
  void complete();
  // From now on, adds the ns waited for each source to `wait_cost` [R]; null: to nothing.
  void count_waits(int64_t* wait_cost) { wait_cost_ = wait_cost; }
  // Continues an operation whose send part closed `stages` stages, and has waited for all of the peers' stages but the
  // last.
  void resume_after(int stages) {
    stages_ = stages;
    heard_stages_ = stages - 1;
  }

  int bank() const { return bank_; }
  const LlOffsets& offsets() const { return offsets_; }

 private:
  template <class Ready>
  bool await(Awaited awaited, int source, uint64_t expected, Ready ready);
  void send_tagged(int peer, Offset offset, const uint32_t* values, int count);
  void tell_mask(int peer);
  void mask(int rank);
  bool was_left_by(int source) const;
  bool is_late(int source, std::chrono::steady_clock::time_point now);
  [[noreturn]] void give_up(Deadline::End end, Awaited awaited, int source, uint64_t expected, uint64_t seen);
  [[noreturn]] void refuse_op(int source, const OpHeader& theirs);
  [[noreturn]] void refuse_handle(int source, const OpHeader& theirs);
  void refuse_other_call(int source);
  uint32_t* window_word(Offset offset) const;
  bool has_heard(int source) const;

  Transport& transport_;
  CpuState& state_;
  const Kind kind_;
  const LlOffsets offsets_;
  const OpHeader header_;
  const uint64_t epoch_;
  const uint32_t tag_;
  const int bank_;
  std::vector<OpHeader> headers_;
  std::deque<std::vector<char>> sources_;  // of puts that have not been flushed
  int stages_ = 0;                         // closed by the sender; each is one arrival signal
  int heard_stages_ = 0;
  Deadline deadline_;
  int64_t* wait_cost_ = nullptr;
};

}  // namespace ep
