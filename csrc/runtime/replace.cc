// A rank that is replaced: a new process takes the number of one that has ended. The others keep their windows,
// addresses and masks. All begin anew behind the last call of any of them, so that the new one counts as they do.
#include <algorithm>

#include "base/check.h"
#include "runtime/group.h"
#include "transport/collective_step.h"
#include "transport/session.h"

namespace ep {

void Group::check_elastic() const {
  if (!config_.is_elastic) return;
  EP_CHECK(config_.masks_late_ranks, "an elastic buffer has masks: make it with enable_shrink");
  EP_CHECK(!config_.has_ht(),
           "an elastic buffer serves low latency, since high throughput has no masks: make it "
           "with mode=\"ll\"");
  EP_CHECK(topology_.num_domains() == 1, "the ranks of an elastic buffer must be in one domain, these are ",
           topology_.num_ranks, " in ", topology_.num_domains());
}

// Also of those who take a place: whoever was there before has ended.
void Group::watch_processes(Bootstrap& bootstrap) {
  const auto all = gather(bootstrap, own_process(), "its process");
  on_all_ranks(bootstrap, [&] {
    processes_.resize(num_ranks());
    for (size_t seat = 0; seat < all.size(); seat++) {
      ProcessWatch& known = processes_[bootstrap.rank_at(static_cast<int>(seat))];
      if (!(known.process() == all[seat])) known = ProcessWatch(all[seat]);
    }
  });
}

void Group::replace(Bootstrap& given, int rank, double seconds) {
  EP_CHECK_USAGE(config_.is_elastic, "rank ", rank, " cannot be replaced: the buffer was made without elastic");
  EP_CHECK(rank >= 0 && rank < num_ranks() && rank != rank_, "rank ", rank, " to be replaced by rank ", rank_, " of ",
           num_ranks());
  Session bootstrap(given, Collective::kReplaceRank);
  agreement_of(config_, num_ranks()).check(bootstrap);
  const auto epochs = gather_from_steps(
      bootstrap,
      [&] {
        require_usable();
        require_no_send("a rank is replaced");
        const ProcessWatch& old = processes_[rank];
        // Of a thread of this process the caller knows; of one that was away when this rank came, others know.
        EP_CHECK_USAGE(old.process() == own_process() || old.has_ended_within(seconds / 2), "rank ", rank,
                       " is to be replaced, but its process ", old.process().pid, " still runs: end it first");
        return backend()->settle();
      },
      "its epochs");
  backend()->set_mask(rank, true);  // if the new one does not come to the end, the others go on without it
  watch_processes(bootstrap);
  backend()->replace(bootstrap, rank, seconds);
  is_partly_cleaned_ = true;  // some have new epochs
  on_all_ranks(bootstrap, [&] { backend()->restart(behind(epochs)); });
  backend()->set_mask(rank, false);
  is_partly_cleaned_ = false;
}

// The last steps of replace(), of the new rank.
void Group::join(Bootstrap& bootstrap, const LlEpochs& latest) {
  std::vector<bool> is_there(num_ranks());
  for (int seat = 0; seat < bootstrap.num_ranks(); seat++) is_there[bootstrap.rank_at(seat)] = true;
  on_all_ranks(bootstrap, [&] {
    backend()->restart(latest);
    for (int r = 0; r < num_ranks(); r++) {
      if (!is_there[r]) backend()->set_mask(r, true);
    }
  });
}

}  // namespace ep
