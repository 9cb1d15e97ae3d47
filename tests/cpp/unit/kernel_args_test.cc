// What every kernel is told of its buffer, whatever its mode.
#include "cuda/protocol/kernel_args.h"

#include <gtest/gtest.h>

#include <type_traits>

#include "cuda/ht/common/geometry.h"
#include "cuda/ll/common/geometry.h"

namespace ep {
namespace {

template <class Params>
class Args : public ::testing::Test {};
using AllParams = ::testing::Types<LlDispatchParams, LlCombineParams, LlCombineWeightsParams, HtRouteParams,
                                   HtDispatchParams, HtCombineParams>;
TYPED_TEST_SUITE(Args, AllParams);

TYPED_TEST(Args, KnowTheRanksOfTheBuffer) {
  LsaPeers peers;
  peers.rank = 2;
  TypeParam params;
  const auto args = KernelArgs<TypeParam>::of(nullptr, peers, 6, {}, {}, params);
  EXPECT_EQ(args.num_ranks, 6);
  EXPECT_EQ(args.peers.rank, 2);
  EXPECT_EQ(args.state, nullptr);
}

TEST(KernelArgs, LowLatencyKnowsWhereCreditsLie) {
  char window[4096] = {};
  LsaPeers peers{window, 0, 0};
  LlDispatchParams params;
  params.offsets.num_ranks = 4;
  const auto args = KernelArgs<LlDispatchParams>::of(nullptr, peers, 4, {}, {}, params);
  EXPECT_EQ(args.credits, peers.local<uint64_t>(params.offsets.signal(0)));
}

}  // namespace
}  // namespace ep
