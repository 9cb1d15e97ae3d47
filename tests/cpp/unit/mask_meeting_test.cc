// Hosts that clean their masks, as threads: who is a member, who waits for how long, and who falls silent.
#include "runtime/mask_meeting.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <mutex>

#include "unit/errors.h"

namespace ep {
namespace {

RankMask ranks_of(std::initializer_list<int> ranks) {
  RankMask mask;
  for (const int rank : ranks) mask.add(rank);
  return mask;
}

// The words of all ranks, in one place.
class MeetingRoom {
 public:
  MeetingRoom(int num_ranks, double timeout) : num_ranks_(num_ranks), timeout_(timeout), used_(num_ranks) {
    windows_.assign(num_ranks, std::vector<uint64_t>(num_ranks * MeetingWords::count(num_ranks)));
  }

  MaskMeeting::Setting setting(int rank, const RankMask& masked) {
    const uint64_t place = rank * MeetingWords::count(num_ranks_);
    return {.rank = rank,
            .num_ranks = num_ranks_,
            .masked = masked,
            .store =
                [this, place](int peer, int index, const std::vector<uint64_t>& words) {
                  std::lock_guard lock(mutex_);
                  std::copy(words.begin(), words.end(), windows_[peer].begin() + place + index);
                },
            .load =
                [this, rank] {
                  std::lock_guard lock(mutex_);
                  return windows_[rank];
                },
            .timeout = [this] { return timeout_; },
            .poll = [] {}};
  }
  // The members' names, with a bar behind those who are in the epoch of their rank; or the error.
  std::string meet(int rank, const RankMask& masked = {}, bool is_ready = true, bool ends = true) {
    std::string names;
    const std::string error = error_of([&] {
      MaskMeeting meeting(setting(rank, masked), used_[rank]);
      const RankMask members = meeting.members();
      const uint64_t epoch = (1ull << 40) + rank;
      const auto reports = meeting.reports({is_ready, {{epoch, 7}}});
      size_t seat = 0;
      for (int r = 0; r < num_ranks_; r++) {
        if (!members.has(r)) continue;
        const MeetingReport& report = reports[seat++];
        EXPECT_EQ(report.epochs.of[0], (1ull << 40) + r);
        EXPECT_EQ(report.epochs.of[1], 7u);
        names += std::to_string(r) + (report.is_ready ? "" : "!");
      }
      EXPECT_EQ(seat, reports.size());
      if (ends) meeting.end();
    });
    return error.empty() ? names : error;
  }
  std::future<std::string> meet_beside(int rank, const RankMask& masked = {}, bool is_ready = true, bool ends = true) {
    return std::async(std::launch::async, [=, this] { return meet(rank, masked, is_ready, ends); });
  }

 private:
  const int num_ranks_;
  const double timeout_;
  std::mutex mutex_;
  std::vector<std::vector<uint64_t>> windows_;
  std::vector<std::vector<uint32_t>> used_;
};

constexpr double kLongDeadline = 100, kShortDeadline = 0.2;

TEST(MaskMeeting, AllThatComeAreMembersWhoeverHasMaskedWhom) {
  MeetingRoom room(3, kLongDeadline);
  for (int round = 0; round < 20; round++) {  // again and again over the same words
    auto first = room.meet_beside(0, ranks_of({2})), second = room.meet_beside(1, ranks_of({2}));
    EXPECT_EQ(room.meet(2, ranks_of({0, 1})), "012");
    EXPECT_EQ(first.get(), "012");
    EXPECT_EQ(second.get(), "012");
  }
}

TEST(MaskMeeting, ServesMoreRanksThanBitsOfAWord) {
  constexpr int kRanks = 34;
  MeetingRoom room(kRanks, kLongDeadline);
  std::vector<std::future<std::string>> others;
  for (int rank = 1; rank < kRanks; rank++) others.push_back(room.meet_beside(rank, ranks_of({0})));
  const std::string all = room.meet(0);
  EXPECT_TRUE(all.starts_with("0123") && all.ends_with("3233")) << all;
  for (auto& other : others) EXPECT_EQ(other.get(), all);
}

TEST(MaskMeeting, AMaskedRankIsWaitedForOneDeadline) {
  MeetingRoom room(3, kShortDeadline);
  const auto begin = std::chrono::steady_clock::now();
  auto other = room.meet_beside(1, ranks_of({2}));
  EXPECT_EQ(room.meet(0, ranks_of({2})), "01");
  EXPECT_EQ(other.get(), "01");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_GE(seconds, MaskMeeting::kForMasked * kShortDeadline);
}

TEST(MaskMeeting, ARankThatIsNotMaskedIsWaitedForFourDeadlines) {
  MeetingRoom room(2, kShortDeadline);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(room.meet(1), "1");
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_GE(seconds, MaskMeeting::kForActive * kShortDeadline);
}

TEST(MaskMeeting, ARankThatIsNotReadyIsHeardOfByAll) {
  MeetingRoom room(2, kLongDeadline);
  auto other = room.meet_beside(1, {}, false);
  EXPECT_EQ(room.meet(0), "01!");
  EXPECT_EQ(other.get(), "01!");
}

constexpr const char* kGoneOrBefore = ". It is gone, or has met others before this rank came";

TEST(MaskMeeting, AMemberThatFallsSilentIsNamedAndNotBelievedAgain) {
  MeetingRoom room(2, kShortDeadline);
  std::vector<uint32_t> used;
  auto silent = std::make_unique<MaskMeeting>(room.setting(1, {}), used);  // comes, and says nothing more
  EXPECT_EQ(
      room.meet(0),
      std::string("masks are not cleaned: within 2 deadlines rank 1 has not reported how far it is") + kGoneOrBefore);
  EXPECT_EQ(room.meet(0, ranks_of({1})), "0");  // its word still says that it is here
  silent.reset();
  auto other = room.meet_beside(1);
  EXPECT_EQ(room.meet(0), "01");
  EXPECT_EQ(other.get(), "01");
}

TEST(MaskMeeting, ALeaderThatTellsNothingIsFollowedByAnother) {
  MeetingRoom room(3, kShortDeadline);
  std::vector<uint32_t> used;
  auto silent = std::make_unique<MaskMeeting>(room.setting(0, {}), used);
  auto second = room.meet_beside(2);
  EXPECT_EQ(room.meet(1), "12");
  EXPECT_EQ(second.get(), "12");
  silent.reset();
  auto first = room.meet_beside(0);
  second = room.meet_beside(2);
  EXPECT_EQ(room.meet(1), "012");
  EXPECT_EQ(first.get(), "012");
  EXPECT_EQ(second.get(), "012");
}

TEST(MaskMeeting, AMemberThatDoesNotEndIsNamed) {
  MeetingRoom room(2, kShortDeadline);
  auto other = room.meet_beside(1, {}, true, false);
  EXPECT_EQ(room.meet(0),
            std::string("masks are not cleaned: within 2 deadlines rank 1 has not cleaned its masks") + kGoneOrBefore);
  EXPECT_EQ(other.get(), "01");
}

TEST(MaskMeeting, RanksThatFailMeetAgainAtOnce) {
  MeetingRoom room(3, kLongDeadline);
  for (int round = 0; round < 20; round++) {
    auto first = room.meet_beside(1, {}, false, false), second = room.meet_beside(2, {}, true, false);
    EXPECT_EQ(room.meet(0, {}, true, false), "01!2");
    EXPECT_EQ(first.get(), "01!2");
    EXPECT_EQ(second.get(), "01!2");
  }
}

TEST(MaskMeeting, AWaitEndsWhereItsOwnerSays) {
  MeetingRoom room(2, kLongDeadline);
  auto setting = room.setting(0, {});
  setting.poll = [] { raise(ErrorKind::kInvalidUsage, "over"); };
  std::vector<uint32_t> used;
  EXPECT_EQ(error_of([&] { MaskMeeting(setting, used).members(); }), "over");
}

}  // namespace
}  // namespace ep
