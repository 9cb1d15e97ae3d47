// Masks: a buffer that was made for it goes on in low latency without the ranks that have missed a deadline. Each rank
// has masks of its own; who is masked learns of it in the next record (OpHeader::kIsMasked), and masks in return.
#include <algorithm>

#include "base/check.h"
#include "base/interruption.h"
#include "runtime/group.h"
#include "runtime/mask_meeting.h"
#include "runtime/one_caller.h"
#include "transport/collective_step.h"
#include "transport/session.h"

namespace ep {

void Group::mask(int rank, void* stream) {
  require_usable();
  EP_CHECK_USAGE(config_.masks_late_ranks, "rank ", rank, " cannot be masked: the buffer was made without masks");
  EP_CHECK(rank >= 0 && rank < num_ranks(), "rank ", rank, " to mask, must be 0 to ", num_ranks() - 1);
  EP_CHECK(rank != rank_, "rank ", rank, " to mask is this rank itself");
  backend()->mask(rank, stream);
}

void Group::update_masks(const RankMask& masked, void* stream) {
  require_usable();
  EP_CHECK_USAGE(config_.masks_late_ranks, "masks cannot be set: the buffer was made without masks");
  EP_CHECK(!masked.has(rank_), "rank ", rank_, " to mask is this rank itself");
  backend()->update_masks(masked, stream);
}

void Group::query_masks(int32_t* status, void* stream) {
  require_usable();
  backend()->query_masks(status, stream);
}

void Group::require_no_send(const char* before) const {
  for (int kind = 0; kind < kNumKinds; kind++) {
    EP_CHECK_USAGE(!has_unreceived_send_[kind], "a ", kind == 0 ? "dispatch" : "combine",
                   " was sent and has not been received: receive it before ", before);
  }
}

// Ranks that were masked have made fewer calls, or more.
LlEpochs Group::behind(const std::vector<LlEpochs>& all) {
  LlEpochs latest;
  for (const LlEpochs& theirs : all) {
    for (int kind = 0; kind < kNumKinds; kind++) latest.of[kind] = std::max(latest.of[kind], theirs.of[kind]);
  }
  // One further: of the next call of the other kind some may have been told that they are masked in it.
  for (uint64_t& epoch : latest.of) epoch++;
  return latest;
}

// One that is interrupted leaves alone, and the others find out by their own deadlines.
void Group::require_waiting() const {
  EP_CHECK_USAGE(!is_destroyed(), "the buffer was destroyed while its masks were cleaned");
  if (has_interruption()) throw Interrupted("cleaning masks");
}

void Group::clean_masks(Bootstrap& bootstrap) {
  if (topology_.num_domains() == 1) return clean_with_who_comes();
  EP_CHECK_USAGE(!has_missed_cleaning_, "a rank did not come when masks were to be cleaned: make a new buffer");
  has_missed_cleaning_ = true;  // then the ranks are not at the same step any more
  try {
    clean_with_all(bootstrap);
  } catch (const Error& error) {
    has_missed_cleaning_ = error.kind() != ErrorKind::kInvalidUsage;
    throw;
  }
  has_missed_cleaning_ = false;
}

void Group::clean_with_who_comes() {
  require_usable();
  EP_CHECK_USAGE(config_.masks_late_ranks, "masks cannot be cleaned: the buffer was made without masks");
  const OneCaller caller(is_called_);
  const std::shared_ptr<Backend> held = backend();
  Backend& backend = *held;
  std::exception_ptr refused;
  try {
    require_no_send("masks are cleaned");
  } catch (const Error&) {
    refused = std::current_exception();
  }
  const MeetingReport own{refused == nullptr, backend.settle()};
  const Region<uint64_t>& words = window_.meeting;
  const uint64_t place = rank_ * MeetingWords::count(num_ranks());
  MaskMeeting meeting({.rank = rank_,
                       .num_ranks = num_ranks(),
                       .masked = backend.report(false).left_out,
                       .store = [&](int peer, int index,
                                    const auto& said) { backend.store_words(peer, words.at(place + index), said); },
                       .load = [&] { return backend.load_words(words.offset, words.count); },
                       .timeout = [this] { return timeout_seconds(); },
                       .poll = [this] { require_waiting(); }},
                      used_numbers_);
  const RankMask members = meeting.members();
  std::vector<LlEpochs> epochs;
  const auto reports = meeting.reports(own);
  if (refused) std::rethrow_exception(refused);
  for (int rank = 0; rank < num_ranks(); rank++) {
    if (!members.has(rank)) continue;
    const MeetingReport& report = reports[epochs.size()];
    EP_CHECK_USAGE(report.is_ready, "on rank ", rank, ": a call was sent and has not been received: receive it before ",
                   "masks are cleaned");
    epochs.push_back(report.epochs);
  }
  is_partly_cleaned_ = true;  // who gives up from here on does not know how far the others get
  backend.restart(behind(epochs));
  meeting.end();
  backend.unmask_all(members);
  is_partly_cleaned_ = false;
}

// The links between domains begin anew, which takes every rank.
void Group::clean_with_all(Bootstrap& given) {
  Session bootstrap(given, Collective::kCleanMasks);
  LlEpochs own;
  on_all_ranks(bootstrap, [&] {
    require_usable();
    require_no_send("masks are cleaned");
    own = backend()->settle();
  });
  // Who gives up from here on does not know how far the others get, and they have new epochs then.
  is_partly_cleaned_ = true;
  const LlEpochs latest = behind(gather(bootstrap, own, "its epochs"));
  on_all_ranks(bootstrap, [&] { backend()->restart(latest); });
  // No earlier: a rank that has heard of no end is still masked.
  backend()->unmask_all(RankMask{}.complement(num_ranks()));
  is_partly_cleaned_ = false;
}

}  // namespace ep
