#include "cpu/ll/exchange.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/check.h"
#include "base/testing.h"
#include "cpu/common/row_signals.h"
#include "runtime/failure_node.h"
#include "runtime/group.h"

namespace ep {
namespace {

std::atomic_ref<uint32_t> atomic_word(uint32_t* address) { return std::atomic_ref<uint32_t>(*address); }

OpHeader with_handle(OpHeader header, const int32_t* dispatch) {
  if (dispatch != nullptr) header.words[OpHeader::kLlHandle] = static_cast<uint32_t>(*dispatch);
  return header;
}

}  // namespace

Exchange::Exchange(Transport& transport, CpuState& state, Kind kind, const LlOffsets& offsets, const OpHeader& header,
                   const int32_t* given_dispatch)
    : transport_(transport),
      state_(state),
      kind_(kind),
      offsets_(offsets),
      header_(with_handle(header, given_dispatch)),
      epoch_(state.epoch[static_cast<int>(kind)] + 1),
      tag_(tag_of(epoch_)),
      bank_(testing::has_bug(testing::Bug::kOneBank) ? 0 : bank_of(epoch_)),
      headers_(offsets.num_ranks),
      deadline_(state.control, state.masks_late ? 0.5 : 1) {
  state.next_calls.begin(false, kind, epoch_);
  state.recalled = {};  // they have not come back
}

Exchange::~Exchange() {
  if (!sources_.empty()) transport_.flush();
}

uint32_t* Exchange::window_word(Offset offset) const {
  return reinterpret_cast<uint32_t*>(transport_.local_window() + offset);
}

// ---- Sending

void Exchange::send_header(int peer) {
  testing::delay(testing::Point::kBeforeHeader, rank());
  uint32_t words[OpHeader::kWords];
  for (int i = 0; i < OpHeader::kWords; i++) words[i] = header_.word(i);
  if (is_masked(peer)) {
    tell_mask(peer);
  } else {
    send_tagged(peer, offsets_.header(bank_, rank()), words, OpHeader::kWords);
  }
  testing::delay(testing::Point::kAfterHeader, rank());
}

// A masked rank may still read the rest of an earlier header.
void Exchange::tell_mask(int peer) {
  const uint32_t is_masked = 1;
  const Offset word_at = offsets_.header(bank_, rank()) + OpHeader::kIsMasked * sizeof(TaggedWord);
  send_tagged(peer, word_at, &is_masked, 1);
}

void Exchange::mask(int rank) {
  state_.masked.add(rank);
  tell_mask(rank);
}

void Exchange::send_words(int peer, Offset offset, const uint32_t* values, int count) {
  if (!is_masked(peer)) send_tagged(peer, offset, values, count);
}

void Exchange::keep_word(Offset offset, uint32_t value) {
  atomic_tagged(transport_.local_window() + offset).store(pack({value, tag_}), std::memory_order_relaxed);
}

void Exchange::send_tagged(int peer, Offset offset, const uint32_t* values, int count) {
  state_.wire.other_bytes[peer] += count * sizeof(TaggedWord);
  if (char* target = transport_.peer_ptr(peer, offset)) {
    // Release: a rank that sees a word of this operation also sees that this rank has emptied the bank of the operation
    // before last.
    for (int i = 0; i < count; i++) {
      atomic_tagged(target + i * sizeof(TaggedWord)).store(pack({values[i], tag_}), std::memory_order_release);
    }
    return;
  }
  std::vector<char>& source = sources_.emplace_back(count * sizeof(TaggedWord));
  for (int i = 0; i < count; i++) {
    const TaggedWord word{values[i], tag_};
    std::memcpy(source.data() + i * sizeof word, &word, sizeof word);
  }
  transport_.put(peer, offset, source.data(), source.size());
}

void Exchange::send_row_to(int peer, Offset slot, const uint32_t* words, int num_words) {
  if (is_masked(peer)) return;
  testing::delay(testing::Point::kBetweenRows, rank());
  state_.wire.rows[peer] += 1;
  state_.wire.row_bytes[peer] += num_words * sizeof(uint32_t);
  if (char* target = transport_.peer_ptr(peer, slot)) {
    auto* target_words = reinterpret_cast<uint32_t*>(target);
    for (int i = 0; i < num_words; i++) atomic_word(target_words + i).store(words[i], std::memory_order_relaxed);
    return;
  }
  const char* bytes = reinterpret_cast<const char*>(words);
  std::vector<char>& source = sources_.emplace_back(bytes, bytes + num_words * sizeof(uint32_t));
  transport_.put(peer, slot, source.data(), source.size());
}

void Exchange::close_stage() {
  stages_++;
  for (int peer = 0; peer < num_ranks(); peer++) {
    if (!transport_.topology().is_lsa(rank(), peer)) transport_.signal_add(peer, offsets_.signal(rank()), 1);
  }
  transport_.flush();
  sources_.clear();
}

// ---- Receiving

// What comes over a network must not be read before its signal.
bool Exchange::has_heard(int source) const {
  if (!transport_.topology().is_lsa(rank(), source)) {
    return transport_.signal(offsets_.signal(source)) > state_.arrivals[static_cast<int>(kind_)];
  }
  char* header = transport_.local_window() + offsets_.header(bank_, source);
  return static_cast<uint32_t>(atomic_tagged(header).load(std::memory_order_acquire) >> 32) == tag_;
}

void Exchange::give_up(Deadline::End end, Awaited awaited, int source, uint64_t expected, uint64_t seen) {
  Failure failure{code_of(end), kind_, awaited, source, epoch_, expected, seen, {}, header_, {}, 0};
  failure.waited_seconds = deadline_.waited_seconds();
  for (int r = 0; r < num_ranks(); r++) {
    if (r != rank() && !has_heard(r)) failure.missing.add(r);
  }
  fail(state_, failure, transport_);
}

void Exchange::refuse_op(int source, const OpHeader& theirs) {
  fail(state_, {Failure::kOtherOp, kind_, Awaited::kOpHeader, source, epoch_, 0, 0, {}, header_, theirs, 0},
       transport_);
}

void Exchange::refuse_handle(int source, const OpHeader& theirs) {
  const uint32_t mine = header_.word(OpHeader::kLlHandle), other = theirs.word(OpHeader::kLlHandle);
  fail(state_, {Failure::kOtherHandle, kind_, Awaited::kOpHeader, source, epoch_, mine, other, {}, header_, theirs, 0},
       transport_);
}

// What comes over a network is read behind its signal alone.
void Exchange::refuse_other_call(int source) {
  if (!transport_.topology().is_lsa(rank(), source)) return;
  const auto theirs = state_.next_calls.other_than(false, kind_, source, transport_.local_window());
  if (theirs && !has_heard(source)) refuse_op(source, *theirs);
}

// Whether the source has masked this rank, in this operation or, if this rank is behind, in a later one.
bool Exchange::was_left_by(int source) const {
  for (int bank = 0; bank < kNumBanks; bank++) {
    const Offset word_at = offsets_.header(bank, source) + OpHeader::kIsMasked * sizeof(TaggedWord);
    const uint64_t word = atomic_tagged(transport_.local_window() + word_at).load(std::memory_order_acquire);
    if (static_cast<uint32_t>(word) == 1 && is_not_before(static_cast<uint32_t>(word >> 32), tag_)) return true;
  }
  return false;
}

// With masks, a wait calls it now and then.
bool Exchange::is_late(int source, std::chrono::steady_clock::time_point now) {
  state_.heartbeats.exchange(transport_, state_.heartbeats_at, now, state_.control.timeout_seconds);
  return deadline_.is_late(now, state_.heartbeats.last_of(source));
}

// `ready` returns true when the wait is over and otherwise stores what it saw. False: the source is masked.
template <class Ready>
bool Exchange::await(Awaited awaited, int source, uint64_t expected, Ready ready) {
  uint64_t seen = 0;
  if (is_masked(source)) return false;
  if (ready(seen)) return true;
  const auto start = std::chrono::steady_clock::now();
  Deadline::End end;
  if (state_.masks_late) {
    bool is_left = false;
    end = deadline_.wait_until([&] { return ready(seen) || (is_left = was_left_by(source)); },
                               [&](auto now) { return is_late(source, now); });
    if (is_left || end == Deadline::End::kLate) {
      mask(source);
      return false;
    }
  } else {
    end = deadline_.wait_until([&] { return ready(seen); },
                               [&](auto now) {
                                 if (awaited == Awaited::kOpHeader) refuse_other_call(source);
                                 return deadline_.is_over(now);
                               });
  }
  if (end != Deadline::End::kReady) give_up(end, awaited, source, expected, seen);
  if (wait_cost_ != nullptr) {
    const auto waited = std::chrono::steady_clock::now() - start;
    wait_cost_[source] += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
  }
  return true;
}

void Exchange::await_signal(const RowSignals& signals, int row) {
  await_row(signals, row, deadline_, state_, transport_, kind_, epoch_, header_, false);
}

void Exchange::await_arrivals() {
  heard_stages_++;
  const uint64_t expected = state_.arrivals[static_cast<int>(kind_)] + heard_stages_;
  for (int source = 0; source < num_ranks(); source++) {
    if (transport_.topology().is_lsa(rank(), source)) continue;
    await(Awaited::kArrivalSignal, source, expected, [&](uint64_t& seen) {
      seen = transport_.signal(offsets_.signal(source));
      return seen >= expected;
    });
  }
}

void Exchange::await_headers() {
  for (int source = 0; source < num_ranks(); source++) {
    uint32_t words[OpHeader::kWords];
    const Offset header = offsets_.header(bank_, source);
    if (!await_words(source, header, Awaited::kOpHeader, words, OpHeader::kWords)) continue;
    if (words[OpHeader::kIsMasked] != 0) {
      mask(source);
      continue;
    }
    for (int i = 0; i < OpHeader::kWords; i++) headers_[source].words[i] = words[i];
    for (int i = 0; i < OpHeader::kComparedWords; i++) {
      if (words[i] == header_.word(i)) continue;
      if (kind_ == Kind::kCombine && i == OpHeader::kLlHandle) refuse_handle(source, headers_[source]);
      refuse_op(source, headers_[source]);
    }
  }
}

bool Exchange::await_words(int source, Offset offset, Awaited awaited, uint32_t* values, int count) {
  char* address = transport_.local_window() + offset;
  for (int i = 0; i < count; i++) {
    const bool is_there = await(awaited, source, tag_, [&](uint64_t& seen) {
      const uint64_t word = atomic_tagged(address + i * sizeof(TaggedWord)).load(std::memory_order_acquire);
      values[i] = static_cast<uint32_t>(word);
      seen = word >> 32;
      return seen == tag_;
    });
    if (is_there) continue;
    std::fill_n(values, count, 0);
    return false;
  }
  return true;
}

bool Exchange::take_row_from(int source, Offset slot, int token, Awaited awaited, uint32_t* words, int num_words) {
  uint32_t* row = window_word(slot);
  if (transport_.topology().is_lsa(rank(), source)) {
    for (int i = 0; i < num_words; i++) {
      const bool is_there = await(awaited, source, token, [&](uint64_t& seen) {
        words[i] = atomic_word(row + i).load(std::memory_order_relaxed);
        seen = i;
        return words[i] != kAbsent;
      });
      if (is_there) continue;
      std::fill_n(words, num_words, 0);
      return false;
    }
  } else if (is_masked(source)) {
    std::fill_n(words, num_words, 0);
    return false;
  } else {
    std::memcpy(words, row, num_words * sizeof(uint32_t));
  }
  testing::delay(testing::Point::kBeforeReset, rank());
  if (testing::has_bug(testing::Bug::kSkippedReset) && token == 0) return true;
  for (int i = 0; i < num_words; i++) atomic_word(row + i).store(kAbsent, std::memory_order_relaxed);
  return true;
}

void Exchange::complete() {
  if (testing::has_bug(testing::Bug::kReusedEpoch) && epoch_ % 5 == 0) return;
  state_.epoch[static_cast<int>(kind_)] = epoch_;
  state_.arrivals[static_cast<int>(kind_)] += stages_;
}

}  // namespace ep
