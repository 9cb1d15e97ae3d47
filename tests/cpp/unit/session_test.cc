// Records of another try, another step or another collective, and what ranks of one process share by tokens.
#include "transport/session.h"

#include <gtest/gtest.h>

#include <functional>

#include "transport/collective_step.h"
#include "unit/errors.h"
#include "world.h"

namespace ep {
namespace {

// Keeps what was gathered, or says what another one has kept.
class Recorded : public Bootstrap {
 public:
  explicit Recorded(Bootstrap& given) : given_(given) {}
  int rank() const override { return given_.rank(); }
  int num_ranks() const override { return given_.num_ranks(); }
  std::vector<std::string> allgather(std::string_view mine) override {
    auto all = given_.allgather(mine);
    if (change) change(round, all);
    round++;
    kept.push_back(all);
    return all;
  }
  std::function<void(int, std::vector<std::string>&)> change;
  int round = 0;
  std::vector<std::vector<std::string>> kept;

 private:
  Bootstrap& given_;
};

// What every rank of a world of `num_ranks` throws that gathers three times; `change`: what rank 0 hears.
std::vector<std::string> gather_thrice(int num_ranks, std::function<void(int, std::vector<std::string>&)> change,
                                       std::vector<std::vector<std::string>>* kept = nullptr) {
  return run_ranks(num_ranks, [&](Bootstrap& given) {
    Recorded bootstrap(given);
    if (given.rank() == 0) bootstrap.change = change;
    Session session(bootstrap, Collective::kMakeBuffer);
    for (int i = 0; i < 3; i++) {
      const auto all = session.allgather(concat("rank ", given.rank(), " in round ", i));
      for (int r = 0; r < num_ranks; r++) EXPECT_EQ(all[r], concat("rank ", r, " in round ", i));
    }
    if (kept != nullptr && given.rank() == 0) *kept = bootstrap.kept;
  });
}

TEST(Session, GathersWhatWasSent) { EXPECT_EQ(joined(gather_thrice(3, nullptr)), ""); }

// A store that still has the records of an earlier buffer gives one of them, in whatever round.
TEST(Session, ARecordOfAnEarlierTryIsRefused) {
  std::vector<std::vector<std::string>> earlier;
  ASSERT_EQ(joined(gather_thrice(3, nullptr, &earlier)), "");
  for (int stale = 0; stale < 4; stale++) {
    for (int rank : {0, 2}) {
      const auto problems = gather_thrice(3, [&](int round, std::vector<std::string>& all) {
        if (round == stale) all[rank] = earlier[round][rank];
      });
      EXPECT_NE(problems[0].find(rank == 0 ? "the record of rank 0 is one of an earlier try" : "another try"),
                std::string::npos)
          << stale << " " << problems[0];
    }
  }
}

TEST(Session, ARecordOfAnotherStepIsRefused) {
  std::vector<std::string> first;
  const auto problems = gather_thrice(2, [&](int round, std::vector<std::string>& all) {
    if (round == 1) first = all;
    if (round == 2) all[1] = first[1];
  });
  EXPECT_NE(problems[0].find("rank 1 is at step 1 of making a buffer, rank 0 at step 2"), std::string::npos)
      << problems[0];
}

TEST(Session, RecordsInAnotherOrderAreRefused) {
  const auto problems = gather_thrice(2, [](int, std::vector<std::string>& all) { std::swap(all[0], all[1]); });
  EXPECT_NE(problems[0].find("the record of rank 0 is that of rank 1"), std::string::npos) << problems[0];
}

TEST(Session, WhatIsNoRecordIsRefused) {
  for (const char* text : {"", "hello", "a text that is longer than the head of a record, but has no magic word"}) {
    const auto problems = gather_thrice(2, [&](int, std::vector<std::string>& all) { all[1] = text; });
    EXPECT_NE(problems[0].find(concat("rank 1 sent ", std::strlen(text), " bytes that are no record")),
              std::string::npos)
        << problems[0];
  }
}

TEST(Session, CollectivesOfTwoKindsAreRefused) {
  const auto problems = run_ranks(2, [](Bootstrap& bootstrap) {
    Session(bootstrap, bootstrap.rank() == 0 ? Collective::kMakeBuffer : Collective::kCleanMasks);
  });
  EXPECT_EQ(problems[0], "rank 0: rank 1 is cleaning masks, rank 0 is making a buffer");
}

TEST(CollectiveStep, ABrokenOutcomeIsRefused) {
  for (const std::string& text : {std::string(), std::string("9 what"), std::string("=more"), std::string("\xFF")}) {
    const auto problems = run_ranks(2, [&](Bootstrap& given) {
      Recorded bootstrap(given);
      bootstrap.change = [&](int, std::vector<std::string>& all) { all[1 - given.rank()] = text; };
      on_all_ranks(bootstrap, [] {});
    });
    EXPECT_NE(problems[0].find(concat("rank 1 sent ", text.size(), " bytes that are not the outcome")),
              std::string::npos)
        << problems[0];
  }
}

TEST(CollectiveStep, WhatRank0MakesIsOneObject) {
  std::vector<std::shared_ptr<int>> made(3);
  EXPECT_EQ(joined(run_ranks(3,
                             [&](Bootstrap& bootstrap) {
                               made[bootstrap.rank()] =
                                   made_by_rank_0<int>(bootstrap, [] { return std::make_shared<int>(7); });
                             })),
            "");
  EXPECT_EQ(*made[0], 7);
  EXPECT_EQ(made[0], made[1]);
  EXPECT_EQ(made[0], made[2]);
}

// An address on the wire would be followed.
TEST(CollectiveStep, ATokenThatThisProcessDoesNotKnowIsRefused) {
  const auto problems = run_ranks(2, [&](Bootstrap& given) {
    Recorded bootstrap(given);
    bootstrap.change = [](int round, std::vector<std::string>& all) {
      if (round == 0) all[0].replace(1, 8, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF");
    };
    made_by_rank_0<int>(bootstrap, [] { return std::make_shared<int>(7); });
  });
  EXPECT_NE(problems[1].find("rank 0 says that what it made ffffffffffffffff"), std::string::npos) << problems[1];
}

TEST(LocalObjects, AreFoundForAsLongAsTheyLive) {
  auto object = std::make_shared<int>(1);
  const Token token = LocalObjects<int>::add(object), other = LocalObjects<int>::add(object);
  EXPECT_NE(token, other);
  EXPECT_EQ(LocalObjects<int>::find(token), object);
  EXPECT_EQ(LocalObjects<int>::find(random_token()), nullptr);
  EXPECT_EQ(LocalObjects<long>::find(token), nullptr);
  object.reset();
  EXPECT_EQ(LocalObjects<int>::find(token), nullptr);
}

}  // namespace
}  // namespace ep
