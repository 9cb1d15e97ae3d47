// Masks: a buffer that was made for it goes on in low latency without the ranks that have missed a deadline. Each rank
// has masks of its own; who is masked learns of it in the next record (OpHeader::kIsMasked), and masks in return.
#include <algorithm>

#include "base/check.h"
#include "runtime/group.h"
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

void Group::clean_masks(Bootstrap& given) {
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
  backend()->unmask_all();  // no earlier: a rank that has heard of no end is still masked
  is_partly_cleaned_ = false;
}

}  // namespace ep
