// Which NCCL libraries are accepted, and that a step that fails on one rank fails on all.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "transport/collective_step.h"
#include "transport/nccl/gin/releases.h"
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

// ---- Kernels for several domains

TEST(GinRelease, OldReleasesServeThemselvesAlone) {
  EXPECT_EQ(gin_release_for(23007, {23007, 23102}), 23007);
  for (int loaded : {22809, 22907, 23004, 23006, 23008})
    EXPECT_EQ(gin_release_for(loaded, {23007, 23102}), 0) << loaded;
  EXPECT_EQ(gin_release_for(23004, {23004}), 0);  // its memory would be corrupted
}

TEST(GinRelease, FromCompatibleReleasesOnTheNewestThatIsNoNewer) {
  EXPECT_EQ(gin_release_for(23102, {23007, 23102}), 23102);
  EXPECT_EQ(gin_release_for(23203, {23007, 23102}), 23102);
  EXPECT_EQ(gin_release_for(23203, {23007, 23102, 23203, 23300}), 23203);
  EXPECT_EQ(gin_release_for(23100, {23007, 23102}), 0);  // older than the kernels
  EXPECT_EQ(gin_release_for(23102, {23007}), 0);
  EXPECT_EQ(gin_release_for(30100, {23007, 23102}), 0);
  EXPECT_EQ(gin_release_for(23007, {}), 0);
}

TEST(GinRelease, TheProblemSaysWhatToInstall) {
  const std::string old = gin_version_problem(22809, {23007, 23102});
  EXPECT_NE(old.find("need NCCL 2.30.7 exactly, NCCL 2.31.2 and newer"), std::string::npos) << old;
  EXPECT_NE(old.find("loaded NCCL 2.28.9"), std::string::npos) << old;
  EXPECT_NE(old.find("pip install --no-deps \"nvidia-nccl-cu13>=2.31.2\""), std::string::npos) << old;
  const std::string only = gin_version_problem(23102, {23007});
  EXPECT_NE(only.find("nvidia-nccl-cu13==2.30.7"), std::string::npos) << only;
  const std::string none = gin_version_problem(23102, {});
  EXPECT_NE(none.find("NCCL_EP_GIN_NCCL_INCLUDE_DIRS"), std::string::npos) << none;
  for (const std::string& text : {old, only, none}) EXPECT_EQ(text.find('\n'), std::string::npos);
}

TEST(GinRelease, IsInTheNameOfItsFile) {
  EXPECT_EQ(gin_release_of("libnccl_ep_gin_2.30.7.so"), 23007);
  EXPECT_EQ(gin_release_of("libnccl_ep_gin_2.31.12.so"), 23112);
  for (const char* other : {"libnccl_ep_gin_2.30.7.so.1", "libnccl_ep_gin_2.30.so", "libnccl_ep.so", ""}) {
    EXPECT_EQ(gin_release_of(other), 0) << other;
  }
}

TEST(Domains, AClaimIsHeldAgainstWhatNcclFinds) {
  EXPECT_EQ(domain_problem(Topology::make(8, 8), 8), "");
  EXPECT_EQ(domain_problem(Topology::make(8, 4), 4), "");
  const std::string several = domain_problem(Topology::make(16, 16), 8);
  EXPECT_NE(several.find("16 ranks crosses NVLink domains of 8 ranks: make the buffer with domain_size=8"),
            std::string::npos)
      << several;
  const std::string claim = domain_problem(Topology::make(16, 4), 8);
  EXPECT_NE(claim.find("domains of 4 ranks, but NCCL finds domains of 8: make it with domain_size=8"),
            std::string::npos)
      << claim;
  const std::string uneven = domain_problem(Topology::make(12, 4), 8);
  EXPECT_NE(uneven.find("put as many ranks on every machine"), std::string::npos) << uneven;
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
