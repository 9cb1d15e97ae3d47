// Groups of the C library: what is refused when one is made, of which no machine has so many ranks.
#include <gtest/gtest.h>

#include <string>

#include "api/c_objects.h"
#include "layout/ll/limits.h"
#include "unit/errors.h"

namespace ep::c {
namespace {

GroupRequest request(ncclEpxAlgorithm_t algorithm, int max_tokens, int device = 0) {
  GroupRequest made;
  made.algorithm = algorithm;
  made.device = device;
  made.num_experts = 2304;
  made.max_tokens = max_tokens;
  made.topk = 8;
  made.max_token_bytes = 14336;
  return made;
}

TEST(CGroup, LowLatencyOfManyRanksIsRefusedOnGpusAlone) {
  constexpr int kRanks = 1152;
  const int most = most_ll_tokens_on_gpus(Shape::make(kRanks, 2304, 8, 1));
  const auto made = [](const GroupRequest& asked) { return error_of([&] { to_group_config(asked, kRanks); }); };
  EXPECT_EQ(made(request(NCCL_EPX_ALGORITHM_LOW_LATENCY, most)), "");
  EXPECT_EQ(made(request(NCCL_EPX_ALGORITHM_LOW_LATENCY, most + 1, NCCL_EPX_DEVICE_CPU)), "");
  const std::string error = made(request(NCCL_EPX_ALGORITHM_LOW_LATENCY, most + 1));
  EXPECT_NE(error.find(concat("max_tokens is ", most + 1, ", low latency of 1152 ranks")), std::string::npos) << error;
  // In groups of both, high throughput has the larger calls.
  const GroupConfig both = to_group_config(request(NCCL_EPX_ALGORITHM_AUTO, 4096), kRanks);
  const GroupConfig low = to_group_config(request(NCCL_EPX_ALGORITHM_LOW_LATENCY, most), kRanks);
  EXPECT_EQ(both.sizes.row_bytes[0], low.sizes.row_bytes[0]);
}

}  // namespace
}  // namespace ep::c
