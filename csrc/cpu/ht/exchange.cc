#include "cpu/ht/exchange.h"

#include <algorithm>

#include "base/check.h"
#include "base/testing.h"
#include "cpu/common/row_signals.h"
#include "runtime/group.h"

namespace ep {
namespace {

OpHeader with_handle(OpHeader header, const int32_t* dispatch) {
  header.words[OpHeader::kHandle] = dispatch == nullptr ? 0 : static_cast<uint32_t>(*dispatch);
  return header;
}

}  // namespace

HtExchange::HtExchange(Transport& transport, CpuState& state, Kind kind, const HtOffsets& offsets,
                       const OpHeader& header, const int32_t* given_dispatch)
    : transport_(transport),
      state_(state),
      kind_(kind),
      offsets_(offsets),
      header_(with_handle(header, given_dispatch)),
      epoch_(state.ht_epoch[static_cast<int>(kind)] + 1),
      tag_(tag_of(epoch_)),
      bank_(testing::has_bug(testing::Bug::kOneBank) ? 0 : bank_of(epoch_)),
      messages_(offsets.topology.num_ranks),
      deadline_(state.control) {
  state.next_calls.begin(true, kind, epoch_);
}

HtExchange::~HtExchange() {
  if (num_domains() > 1) transport_.flush();
}

// ---- Op messages

void HtExchange::send_messages(const std::vector<uint32_t>& words) {
  testing::delay(testing::Point::kBeforeHeader, rank());
  for (int i = 0; i < OpHeader::kWords; i++) sent_.push_back({header_.word(i), tag_});
  for (uint32_t word : words) sent_.push_back({word, tag_});
  const uint64_t bytes = sent_.size() * sizeof(TaggedWord);
  const Offset offset = offsets_.message_word(bank_, rank(), 0);
  for (int step = 0; step < num_ranks(); step++) {
    const int peer = (rank() + step) % num_ranks();
    note_other(peer, bytes);
    char* target = transport_.peer_ptr(peer, offset);
    if (target == nullptr) {
      transport_.put(peer, offset, sent_.data(), bytes);
      signal(peer, message_signal());
      continue;
    }
    // Release: this rank has read all of its last operation, so a rank that sees these words may write into its window.
    for (size_t i = 0; i < sent_.size(); i++) {
      atomic_tagged(target + i * sizeof(TaggedWord)).store(pack(sent_[i]), std::memory_order_release);
    }
  }
  if (num_domains() > 1) state_.ht_sent[static_cast<int>(message_signal())] = epoch_;
  testing::delay(testing::Point::kAfterHeader, rank());
}

void HtExchange::await_headers(int count) {
  for (int source = 0; source < num_ranks(); source++) {
    const bool is_lsa = topology().is_lsa(rank(), source);
    if (!is_lsa) await_signal(message_signal(), source, Awaited::kArrivalSignal);
    std::vector<uint32_t>& words = messages_[source];
    words.resize(OpHeader::kWords + count);
    const auto take = [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; i++) {
        char* address = local(offsets_.message_word(bank_, source, static_cast<int>(i)));
        uint64_t word = 0;
        const auto has_come = [&] {
          word = atomic_tagged(address).load(std::memory_order_acquire);
          return word >> 32 == tag_;
        };
        const Deadline::End end = deadline_.wait_until(has_come, [&](auto now) {
          if (i < OpHeader::kWords && is_lsa) refuse_other_call(source);
          return deadline_.is_over(now);
        });
        const Awaited awaited = i < OpHeader::kWords ? Awaited::kOpHeader : Awaited::kRouting;
        if (end != Deadline::End::kReady) give_up(end, awaited, source, tag_, word >> 32);
        words[i] = static_cast<uint32_t>(word);
      }
    };
    take(0, OpHeader::kWords);  // another operation may have fewer words
    OpHeader theirs;
    std::copy(words.begin(), words.begin() + OpHeader::kWords, theirs.words);
    for (int i = 0; i < OpHeader::kComparedWords; i++) {
      if (theirs.word(i) != header_.word(i)) refuse_op(source, theirs);
    }
    if (theirs.word(OpHeader::kHandle) != header_.word(OpHeader::kHandle)) refuse_handle(source, theirs);
    take(OpHeader::kWords, words.size());
  }
}

void HtExchange::refuse_op(int source, const OpHeader& theirs) {
  fail(state_, {Failure::kOtherOp, kind_, Awaited::kOpHeader, source, epoch_, 0, 0, {}, header_, theirs, 1},
       transport_);
}

void HtExchange::refuse_handle(int source, const OpHeader& theirs) {
  const uint32_t mine = header_.word(OpHeader::kHandle), other = theirs.word(OpHeader::kHandle);
  fail(state_, {Failure::kOtherHandle, kind_, Awaited::kOpHeader, source, epoch_, mine, other, {}, header_, theirs, 1},
       transport_);
}

void HtExchange::refuse_other_call(int source) {
  const auto theirs = state_.next_calls.other_than(true, kind_, source, transport_.local_window());
  if (theirs && !has_heard(source)) refuse_op(source, *theirs);
}

// ---- Memory and signals

void HtExchange::put(int peer, Offset destination, Offset source, uint64_t bytes) {
  transport_.put(peer, destination, local(source), bytes);
}

// The word at the peer becomes the epoch. Its value before is known, as all readers of a signal are sent it at the same
// time.
void HtExchange::signal(int peer, HtSignal which) {
  transport_.signal_add(peer, offsets_.signal(which, rank()), epoch_ - state_.ht_sent[static_cast<int>(which)]);
}

void HtExchange::signal_domain(HtSignal which) {
  for (int step = 0; step < topology().domain_size; step++) signal(lsa_peer(step), which);
  state_.ht_sent[static_cast<int>(which)] = epoch_;
}

void HtExchange::signal_rail(HtSignal which) {
  for (int other = 0; other < num_domains(); other++) {
    if (other != domain()) signal(offsets_.rail_peer(rank(), other), which);
  }
  state_.ht_sent[static_cast<int>(which)] = epoch_;
}

void HtExchange::await_domain(HtSignal which, Awaited awaited) {
  for (int step = 0; step < topology().domain_size; step++) await_signal(which, lsa_peer(step), awaited);
}

void HtExchange::await_rail(HtSignal which, Awaited awaited) {
  for (int other = 0; other < num_domains(); other++) {
    if (other != domain()) await_signal(which, offsets_.rail_peer(rank(), other), awaited);
  }
}

uint64_t HtExchange::seen_signal(HtSignal which, int source) const {
  return transport_.signal(offsets_.signal(which, source));
}

void HtExchange::await_signal(HtSignal which, int source, Awaited awaited) {
  const auto has_come = [&] { return seen_signal(which, source) >= epoch_; };
  const Deadline::End end = deadline_.wait_until(has_come);
  if (end != Deadline::End::kReady) give_up(end, awaited, source, epoch_, seen_signal(which, source));
}

void HtExchange::await_row(const RowSignals& signals, int row) {
  ep::await_row(signals, row, deadline_, state_, transport_, kind_, epoch_, header_, true);
}

// What comes over a network must not be read before its signal.
bool HtExchange::has_heard(int source) const {
  if (!topology().is_lsa(rank(), source)) return seen_signal(message_signal(), source) >= epoch_;
  char* header = local(offsets_.message_word(bank_, source, 0));
  return static_cast<uint32_t>(atomic_tagged(header).load(std::memory_order_acquire) >> 32) == tag_;
}

void HtExchange::give_up(Deadline::End end, Awaited awaited, int source, uint64_t expected, uint64_t seen) {
  Failure failure{code_of(end), kind_, awaited, source, epoch_, expected, seen, {}, header_, {}, 1};
  failure.waited_seconds = deadline_.waited_seconds();
  for (int r = 0; r < num_ranks(); r++) {
    if (r != rank() && !has_heard(r)) failure.missing.add(r);
  }
  fail(state_, failure, transport_);
}

void HtExchange::check_row(int peer, int64_t row, uint64_t rows) {
  if (static_cast<uint64_t>(row) < rows) return;
  fail(state_,
       {Failure::kHandle, kind_, Awaited::kNone, peer, epoch_, rows, static_cast<uint64_t>(row), {}, header_, {}, 1},
       transport_);
}

void HtExchange::note_row(int peer, uint64_t bytes) {
  state_.wire.rows[peer] += 1;
  state_.wire.row_bytes[peer] += bytes;
}

void HtExchange::complete() {
  if (num_domains() > 1) transport_.flush();
  if (testing::has_bug(testing::Bug::kReusedEpoch) && epoch_ % 5 == 0) return;
  state_.ht_epoch[static_cast<int>(kind_)] = epoch_;
}

}  // namespace ep
