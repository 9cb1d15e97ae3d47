// One high-throughput operation's view of the wire on the host: op messages, growing signals, the peers' memory. Throws
// kTimeout or kMismatch and leaves the reason in the state.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "cpu/common/state.h"
#include "cpu/common/wait.h"
#include "layout/ht/offsets.h"
#include "runtime/common/row_signals.h"
#include "transport/transport.h"

namespace ep {

class HtExchange {
 public:
  // `given_dispatch`: of the handle that the operation was given; null: none.
  HtExchange(Transport& transport, CpuState& state, Kind kind, const HtOffsets& offsets, const OpHeader& header,
             const int32_t* given_dispatch);
  ~HtExchange();  // an operation that fails halfway leaves puts behind, which read their sources
  HtExchange(const HtExchange&) = delete;
  HtExchange& operator=(const HtExchange&) = delete;

  int rank() const { return transport_.rank(); }
  const Topology& topology() const { return offsets_.topology; }
  int num_ranks() const { return topology().num_ranks; }
  int num_domains() const { return topology().num_domains(); }
  int domain() const { return topology().domain_of(rank()); }
  const HtOffsets& offsets() const { return offsets_; }
  uint32_t tag() const { return tag_; }
  // Ranks of the own domain. Each rank begins with itself, so that not all begin with the same peer.
  int lsa_peer(int step) const {
    const int size = topology().domain_size;
    return domain() * size + (topology().lsa_rank(rank()) + step) % size;
  }

  // The op message: the op header and `words` from HtMessage::kLayout on, to every rank.
  void send_messages(const std::vector<uint32_t>& words);
  // Waits for the op messages of all ranks, with `count` words behind the op header each, and compares the headers.
  void await_headers(int count);
  uint32_t message_word(int source, int index) const { return messages_[source][index]; }
  int num_tokens(int source) const { return static_cast<int>(message_word(source, OpHeader::kNumTokens)); }

  uint64_t window_bytes() const { return transport_.window_bytes(); }                    // of every rank
  char* at(int peer, Offset offset) const { return transport_.peer_ptr(peer, offset); }  // of the own domain
  char* local(Offset offset) const { return transport_.local_window() + offset; }
  // From the own window to another domain's. The source must not change until the operation ends.
  void put(int peer, Offset destination, Offset source, uint64_t bytes);

  // To every rank of the own domain, and from each of them.
  void signal_domain(HtSignal signal);
  void await_domain(HtSignal signal, Awaited awaited);
  // To the rail peers, one in each other domain, and from each of them.
  void signal_rail(HtSignal signal);
  void await_rail(HtSignal signal, Awaited awaited);
  // Until a row of this rank may be read.
  void await_row(const RowSignals& signals, int row);

  // Checks that a row that the handle names lies in the peer's memory. Throws kInvalidArgument, and the buffer has
  // failed.
  void check_row(int peer, int64_t row, uint64_t rows);

  void note_row(int peer, uint64_t bytes);
  void note_other(int peer, uint64_t bytes) { state_.wire.other_bytes[peer] += bytes; }

  // The operation is over: advances the epoch.
  void complete();

 private:
  void signal(int peer, HtSignal signal);
  void await_signal(HtSignal signal, int source, Awaited awaited);
  uint64_t seen_signal(HtSignal signal, int source) const;
  bool has_heard(int source) const;
  HtSignal message_signal() const {
    return kind_ == Kind::kDispatch ? HtSignal::kDispatchMessage : HtSignal::kCombineMessage;
  }
  [[noreturn]] void refuse_op(int source, const OpHeader& theirs);
  [[noreturn]] void refuse_handle(int source, const OpHeader& theirs);
  void refuse_other_call(int source);
  [[noreturn]] void give_up(Deadline::End end, Awaited awaited, int source, uint64_t expected, uint64_t seen);

  Transport& transport_;
  CpuState& state_;
  const Kind kind_;
  const HtOffsets offsets_;
  const OpHeader header_;
  const uint64_t epoch_;
  const uint32_t tag_;
  const int bank_;
  std::vector<std::vector<uint32_t>> messages_;  // [source]
  std::vector<TaggedWord> sent_;                 // the own message; puts read it
  Deadline deadline_;
};

}  // namespace ep
