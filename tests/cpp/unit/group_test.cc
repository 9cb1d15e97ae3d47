// Which sends a group takes for open.
#include "runtime/group.h"

#include <gtest/gtest.h>

#include "unit/errors.h"
#include "world.h"

namespace ep {
namespace {

// Refuses every operation while `refuses`, as a GPU's backend does with a shape that its kernels do not serve.
class PickyBackend : public Backend {
 public:
  static inline bool refuses = false;
  static inline int num_served = 0;

  const char* name() const override { return "picky"; }
  void dispatch(const LlDispatchParams&, void*) override { serve(); }
  void combine(const LlCombineParams&, void*) override { serve(); }
  void combine_weights(const LlCombineWeightsParams&, void*) override { serve(); }
  void ht_dispatch(const HtDispatchParams&, void*) override { serve(); }
  void ht_combine(const HtCombineParams&, void*) override { serve(); }
  void mask(int, void*) override {}
  void query_masks(int32_t*, void*) override {}
  LlEpochs settle() override { return {}; }
  void restart(const LlEpochs&) override { serve(); }
  void unmask_all(const RankMask&) override {}
  void update_masks(const RankMask&, void*) override {}
  void store_words(int, Offset offset, const std::vector<uint64_t>& words) override {
    std::copy(words.begin(), words.end(), words_.begin() + offset / sizeof(uint64_t));
  }
  std::vector<uint64_t> load_words(Offset offset, uint64_t count) override {
    const auto first = words_.begin() + offset / sizeof(uint64_t);
    return {first, first + count};
  }
  void replace(Bootstrap&, int, double) override {}
  void set_mask(int, bool) override {}
  Failure failure() const override { return {}; }
  Report report(bool) override { return {}; }
  void set_timeout(double) override {}
  void abort() override {}

 private:
  static void serve() {
    if (refuses) raise(ErrorKind::kInvalidArgument, "not served");
    num_served++;
  }

  std::vector<uint64_t> words_ = std::vector<uint64_t>(1 << 20);  // of a window
};

std::unique_ptr<Backend> make_picky(Bootstrap&, const Topology&, const Window&, const GroupConfig&) {
  return std::make_unique<PickyBackend>();
}

class PickyGroup : public ::testing::Test {
 protected:
  PickyGroup() {
    PickyBackend::refuses = false;
    PickyBackend::num_served = 0;
    config_.sizes = sizes_for(shape_, 32, 32);
    group_ = std::make_unique<Group>(bootstrap_, config_, &make_picky);
  }

  template <class Params>
  Params params_of(Phase phase) const {
    Params params;
    params.shape = shape_;
    params.phase = phase;
    params.hidden = 16;
    params.output = OutputShape::make(shape_, OutputLayout::kExpertMajor, 1, 1);
    return params;
  }
  // The text of the error, "" for none.
  std::string dispatch(Phase phase) {
    auto params = params_of<LlDispatchParams>(phase);
    return error_of([&] { group_->dispatch(params, nullptr); });
  }
  std::string combine(Phase phase) {
    auto params = params_of<LlCombineParams>(phase);
    return error_of([&] { group_->combine(params, nullptr); });
  }
  std::string combine_weights() {
    LlCombineWeightsParams params;
    params.shape = shape_;
    return error_of([&] { group_->combine_weights(params, nullptr); });
  }

  const Shape shape_ = Shape::make(1, 2, 1, 1);
  Meeting meeting_{1, 1};
  ThreadBootstrap bootstrap_{meeting_, 0};
  GroupConfig config_;
  std::unique_ptr<Group> group_;
};

TEST_F(PickyGroup, AfterACleaningOfMasksThatEndedHalfwayNothingIsServed) {
  config_.masks_late_ranks = true;
  group_ = std::make_unique<Group>(bootstrap_, config_, &make_picky);
  const auto clean = [&] { return error_of([&] { group_->clean_masks(bootstrap_); }); };
  EXPECT_EQ(clean(), "");
  EXPECT_EQ(dispatch(Phase::kSend), "");
  EXPECT_TRUE(clean().starts_with("a dispatch was sent and has not been received"));
  EXPECT_EQ(dispatch(Phase::kRecv), "");
  PickyBackend::refuses = true;
  EXPECT_EQ(clean(), "not served");
  PickyBackend::refuses = false;
  for (const std::string& said : {clean(), combine_weights()}) {
    EXPECT_NE(said.find("others may have cleaned theirs: destroy the buffer and make a new one"), std::string::npos)
        << said;
  }
}

TEST_F(PickyGroup, ARefusedSendOpensNothing) {
  PickyBackend::refuses = true;
  EXPECT_EQ(dispatch(Phase::kSend), "not served");
  EXPECT_EQ(combine(Phase::kSend), "not served");
  PickyBackend::refuses = false;
  EXPECT_EQ(dispatch(Phase::kRecv), "dispatch: nothing was sent that could be received");
  EXPECT_EQ(combine(Phase::kRecv), "combine: nothing was sent that could be received");
  EXPECT_EQ(dispatch(Phase::kFused), "");
  EXPECT_EQ(combine(Phase::kFused), "");
  EXPECT_EQ(combine_weights(), "");
}

TEST_F(PickyGroup, ARefusedReceiveMayBeMadeAgain) {
  EXPECT_EQ(dispatch(Phase::kSend), "");
  EXPECT_EQ(combine(Phase::kSend), "");
  PickyBackend::refuses = true;
  EXPECT_EQ(dispatch(Phase::kRecv), "not served");
  EXPECT_EQ(combine(Phase::kRecv), "not served");
  PickyBackend::refuses = false;
  EXPECT_EQ(dispatch(Phase::kRecv), "");
  EXPECT_EQ(combine(Phase::kRecv), "");
}

TEST_F(PickyGroup, ASecondSendIsRefusedBeforeTheBackendIsCalled) {
  EXPECT_EQ(dispatch(Phase::kFused), "");
  EXPECT_EQ(dispatch(Phase::kSend), "");
  EXPECT_EQ(combine(Phase::kSend), "");  // of the other kind
  for (Phase phase : {Phase::kSend, Phase::kFused}) {
    EXPECT_EQ(
        dispatch(phase),
        "dispatch 2 was sent and has not been received; receive it (or destroy the buffer) before the next dispatch");
    EXPECT_EQ(
        combine(phase),
        "combine 1 was sent and has not been received; receive it (or destroy the buffer) before the next combine");
  }
  EXPECT_EQ(combine_weights(),
            "combine 1 was sent and has not been received; receive it (or destroy the buffer) before the next combine");
  EXPECT_EQ(PickyBackend::num_served, 3);
}

}  // namespace
}  // namespace ep
