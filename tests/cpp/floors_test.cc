// The benchmark's floors between threads: what sanitizers can see of them. tests/bench/test_floors.py has their
// results.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "world.h"

namespace ep {
namespace {

constexpr int kTokens = 4, kTopk = 2;

// Pushes of two shapes in turn, so that one's rows lie where the other has another rank's, with flags between them.
TEST(Floors, PushesAndFlagsInTurn) {
  for (int domain_size : {0, 1}) {
    const int num_ranks = 3;
    EXPECT_EQ(joined(run_ranks(num_ranks,
                               [&](Bootstrap& bootstrap) {
                                 GroupConfig config;
                                 config.domain_size = domain_size;
                                 config.timeout_seconds = 60;
                                 config.sizes = sizes_for(Shape{num_ranks, 6, kTopk, kTokens}, 256, 256);
                                 const auto group = make_cpu_group(bootstrap, config);
                                 std::vector<int32_t> tokens(num_ranks, kTokens), ids(kTokens * kTopk);
                                 std::vector<int32_t> rows(num_ranks * kTokens * kTopk, 0);
                                 for (size_t i = 0; i < ids.size(); i++) ids[i] = static_cast<int32_t>(i % 6);
                                 const int rounds = 40 / kSlowdown;
                                 for (int round = 0; round < rounds; round++) {
                                   for (Kind kind : {Kind::kDispatch, Kind::kCombine}) {
                                     LlFloorPushParams p;
                                     p.kind = kind;
                                     p.shape = {num_ranks, 6, kTopk, round % 2 == 0 ? kTokens : kTokens / 2};
                                     p.handle = {tokens.data(), ids.data(), rows.data(), nullptr};
                                     std::fill(tokens.begin(), tokens.end(), p.shape.max_tokens);
                                     p.map_k = kTopk;
                                     p.num_tokens = p.shape.max_tokens;
                                     group->floor_push(p, round % 3 == 0 ? 256 : 64, nullptr);
                                     group->floor_flags(nullptr);
                                   }
                                 }
                                 const Report report = group->report();
                                 EP_CHECK(report.epochs[0] == static_cast<uint64_t>(rounds), report.epochs[0]);
                                 EP_CHECK(report.epochs[1] == static_cast<uint64_t>(rounds), report.epochs[1]);
                               })),
              "");
  }
}

}  // namespace
}  // namespace ep
