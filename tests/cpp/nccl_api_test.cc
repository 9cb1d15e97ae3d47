// Which NCCL libraries are accepted, and that a step that fails on one rank fails on all.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "transport/collective_step.h"
#include "transport/nccl/version.h"

namespace ep {
namespace {

TEST(NcclVersion, NamesBothEncodings) {
  EXPECT_EQ(nccl_version_name(22809), "2.28.9");
  EXPECT_EQ(nccl_version_name(23007), "2.30.7");
  EXPECT_EQ(nccl_version_name(21005), "2.10.5");
  EXPECT_EQ(nccl_version_name(2804), "2.8.4");
}

TEST(NcclVersion, OneBinaryServesOldAndNewLibraries) {
  for (int compiled : {22809, 22902, 22907, 23007}) {
    for (int loaded : {22809, 22902, 22907, 23004, 23007, 23204}) {
      EXPECT_EQ(version_problem(compiled, loaded), "") << compiled << " with " << loaded;
    }
  }
}

TEST(NcclVersion, TooOldSaysWhatToInstall) {
  for (int loaded : {2804, 22703, 22803, 22807}) {
    const std::string problem = version_problem(23007, loaded);
    EXPECT_NE(problem.find("compiled with NCCL 2.30.7"), std::string::npos) << problem;
    EXPECT_NE(problem.find("loaded NCCL " + nccl_version_name(loaded)), std::string::npos) << problem;
    EXPECT_NE(problem.find("install NCCL 2.28.9 or newer"), std::string::npos) << problem;
  }
}

TEST(NcclVersion, AnotherMajorIsRefused) {
  const std::string problem = version_problem(22809, 30100);
  EXPECT_NE(problem.find("loaded NCCL 3.1.0"), std::string::npos) << problem;
  EXPECT_NE(problem.find("headers of NCCL 3.1.0"), std::string::npos) << problem;
}

// Rank 0 of a world whose other ranks answer as they are told.
class ScriptedBootstrap : public Bootstrap {
 public:
  explicit ScriptedBootstrap(std::vector<std::string> others) : others_(std::move(others)) {}
  int rank() const override { return 0; }
  int num_ranks() const override { return 1 + static_cast<int>(others_.size()); }
  std::vector<std::string> allgather(std::string_view mine) override {
    sent = std::string(mine);
    std::vector<std::string> all{sent};
    all.insert(all.end(), others_.begin(), others_.end());
    return all;
  }

  std::string sent;

 private:
  std::vector<std::string> others_;
};

TEST(CollectiveStep, PassesWhenAllPass) {
  ScriptedBootstrap bootstrap({"=", "="});
  EXPECT_NO_THROW(on_all_ranks(bootstrap, [] {}));
  EXPECT_EQ(bootstrap.sent, "=");
}

TEST(CollectiveStep, OwnErrorIsToldAndThrown) {
  ScriptedBootstrap bootstrap({"=", "="});
  try {
    on_all_ranks(bootstrap, [] { raise(ErrorKind::kTimeout, "no answer"); });
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_STREQ(error.what(), "no answer");
  }
  ScriptedBootstrap peer({bootstrap.sent});  // what another rank makes of it
  try {
    on_all_ranks(peer, [] {});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_STREQ(error.what(), "on rank 1: no answer");
  }
}

}  // namespace
}  // namespace ep
