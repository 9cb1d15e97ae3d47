// Hosts of one domain that clean their masks meet by words in their windows, for which no rank that stays away is
// needed. Each word has one writer.
//
// 1. A rank that comes says so to all ranks, with a number that is new each time.
// 2. The leader is, of those that have come, the one that has masked the fewest, and of these the first. It waits for
//    the ranks that it has not masked, and for those that it has masked as long as one deadline. Then it tells the
//    members who they are. Whoever is told so follows. Who is not among them has come too late: it meets others, or
//    finds after a while that those it has taken for members do not answer.
// 3. Each member reports to all, and waits for the reports of all. What it writes from here on is tagged by a digest of
//    the members' numbers, so that nothing of another meeting counts.
// 4. Each member says that it is done, and waits until all are.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "layout/window.h"
#include "runtime/backend.h"

namespace ep {

struct MeetingReport {
  bool is_ready = true;  // false: this rank cannot clean its masks
  LlEpochs epochs;
};

class MaskMeeting {
 public:
  // How long a rank waits, in deadlines. For one that it has not masked, as that may be waiting in its last operation;
  // for one that it has masked; for a leader that tells nothing, before it takes another; for words of members.
  static constexpr double kForActive = 4, kForMasked = 1, kForLeader = kForActive + 1, kForMembers = 2;

  struct Setting {
    int rank, num_ranks;
    RankMask masked;  // by this rank
    // Words for the place of this rank in the window of `peer`, from the one of that index on; all words of the own
    // one.
    std::function<void(int peer, int index, const std::vector<uint64_t>& words)> store;
    std::function<std::vector<uint64_t>()> load;
    std::function<double()> timeout;  // seconds of a deadline, as it is now
    std::function<void()> poll;       // throws where a wait is to end
  };

  // Comes to the meeting. `used`: of each rank the last number that is not believed any more. It was a member under it,
  // or was a leader that told nothing.
  MaskMeeting(Setting setting, std::vector<uint32_t>& used);
  // Leaves it.
  ~MaskMeeting();
  MaskMeeting(const MaskMeeting&) = delete;
  MaskMeeting& operator=(const MaskMeeting&) = delete;

  const RankMask& members();
  // Of the members, in order of their ranks. These two throw kTimeout where a member falls silent.
  std::vector<MeetingReport> reports(const MeetingReport& own);
  void end();  // all members have called it

 private:
  struct Arrival {
    uint32_t number, num_active;
  };
  uint64_t word_at(int source, int index) const { return seen_[source * words_of_rank_ + index]; }
  std::optional<uint32_t> tagged_at(int source, int index) const;
  Arrival arrival_of(int source) const;
  bool is_here(int source) const { return arrival_of(source).number != 0; }
  int leader() const;
  uint32_t digest_of(const RankMask& members) const;
  bool closes(double waited) const;
  bool hear();
  std::optional<RankMask> told_by(int leader) const;
  void meet(const RankMask& members);
  void tell(int index, const std::vector<uint32_t>& values);
  void say_arrival(uint64_t word) noexcept;
  // Reads all words again and again until `is_over(seconds waited)`.
  void wait(const std::function<bool(double)>& is_over);
  void await_members(int index, int count, const char* what);

  Setting setting_;
  std::vector<uint32_t>& used_;
  uint64_t words_of_rank_;
  uint32_t number_;
  std::vector<uint64_t> seen_;
  RankMask members_;
  uint32_t tag_ = 0;  // of the members' words; 0: not known yet
};

}  // namespace ep
