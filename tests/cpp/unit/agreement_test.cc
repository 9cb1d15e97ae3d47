// What ranks compare when a group is made, and the sentences that tell what ended one.
#include "runtime/agreement.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/failure_node.h"
#include "runtime/group.h"
#include "unit/errors.h"
#include "world.h"

namespace ep {
namespace {

TEST(Agreement, EveryRankNamesTheFirstDifferenceAndBothValues) {
  const auto problems = run_ranks(3, [](Bootstrap& bootstrap) {
    Agreement agreement;
    agreement.add("the colour", "green");
    agreement.add("the size", bootstrap.rank() == 2 ? 9 : 7);
    agreement.add("the weight", bootstrap.rank());
    agreement.check(bootstrap);
  });
  EXPECT_EQ(problems[0], "rank 0: the ranks disagree about the weight: rank 0 has 0, rank 1 has 1");
  EXPECT_EQ(problems[1], "rank 1: the ranks disagree about the weight: rank 1 has 1, rank 0 has 0");
  EXPECT_EQ(problems[2], "rank 2: the ranks disagree about the size: rank 2 has 9, rank 0 has 7");
}

TEST(Agreement, EqualRanksPass) {
  const auto problems = run_ranks(4, [](Bootstrap& bootstrap) {
    Agreement agreement;
    agreement.add("an empty value", "");
    agreement.add("a value with =", "a=b");
    agreement.check(bootstrap);
  });
  EXPECT_EQ(joined(problems), "");
}

TEST(Agreement, WhatEntriesFollowFromIsNamedInTheirPlace) {
  const auto problems_with = [](const std::string& mine, const std::string& theirs, int more) {
    return run_ranks(2, [&](Bootstrap& bootstrap) {
      Agreement agreement;
      agreement.add("the version", 1);
      agreement.ask("why?");
      agreement.explain(bootstrap.rank() == 0 ? mine : theirs);
      agreement.add("the bytes", 64 + more * bootstrap.rank());
      agreement.check(bootstrap);
    });
  };
  EXPECT_EQ(problems_with("tokens=8, hidden=64", "tokens=8, hidden=96", 1)[0],
            "rank 0: the ranks disagree about hidden: rank 0 has 64, rank 1 has 96; why?");
  EXPECT_EQ(joined(problems_with("tokens=8, hidden=64", "tokens=8, hidden=96", 0)), "") << "which come out the same";
  for (const char* theirs : {"tokens=8", "", "other words"}) {
    EXPECT_EQ(problems_with("tokens=8", theirs, 1)[0],
              "rank 0: the ranks disagree about the bytes: rank 0 has 64, rank 1 has 65; why?");
  }
}

std::vector<std::string> make_groups(int num_ranks, void (*change)(GroupConfig&, int rank)) {
  return run_ranks(num_ranks, [&](Bootstrap& bootstrap) {
    GroupConfig config;
    config.sizes = sizes_for({num_ranks, num_ranks, 2, 4}, 64, 64);
    change(config, bootstrap.rank());
    make_cpu_group(bootstrap, config);
  });
}

TEST(Agreement, GroupsCompareWhatTheyShare) {
  using Change = void (*)(GroupConfig&, int);
  const std::pair<Change, std::string> cases[] = {
      {[](GroupConfig& c, int rank) { c.domain_size = 1 + rank; }, "the domain size: rank 0 has 1, rank 1 has 2"},
      {[](GroupConfig& c, int rank) { c.sizes.tagged_bytes += 128 * rank; },
       "the bytes of routing in a bank: rank 0 has"},
      {[](GroupConfig& c, int rank) { c.sizes.row_bytes[0] += rank; }, "the bytes of dispatched rows in a bank"},
      {[](GroupConfig& c, int rank) { c.sizes.row_bytes[1] += rank; }, "the bytes of combined rows in a bank"},
      {[](GroupConfig& c, int rank) { c.device_index = rank - 1; },
       "the kind of device: rank 0 has cpu, rank 1 has cuda"},
  };
  for (const auto& [change, text] : cases) {
    const auto problems = make_groups(2, change);
    EXPECT_NE(problems[0].find(text), std::string::npos) << problems[0];
    EXPECT_NE(problems[1], "");
  }
  // Deadlines and network seeds are each rank's own.
  EXPECT_EQ(joined(make_groups(2, [](GroupConfig& c, int rank) { c.timeout_seconds = c.network_seed = 5 + rank; })),
            "");
}

TEST(Agreement, RefusesBadConfigurations) {
  EXPECT_NE(make_groups(1, [](GroupConfig& c, int) { c.timeout_seconds = 0; })[0].find("timeout is 0 s"),
            std::string::npos);
  EXPECT_NE(make_groups(1, [](GroupConfig& c, int) { c.timeout_seconds = -1; })[0], "");
  EXPECT_NE(make_groups(1, [](GroupConfig& c, int) { c.timeout_seconds = NAN; })[0], "");
  EXPECT_NE(make_groups(1, [](GroupConfig& c, int) { c.timeout_seconds = INFINITY; })[0], "");
  EXPECT_NE(make_groups(3, [](GroupConfig& c, int) { c.domain_size = 2; })[0].find("3 ranks do not divide"),
            std::string::npos);
}

OpHeader dispatch_call() {
  return {{pack_operation(Operation::kDispatch, DType::kBF16, Quant::kFp8, DType::kBF16), 7168, 8, 256, 128, 224, 5}};
}

TEST(Describe, ACallIsToldWithItsArguments) {
  EXPECT_EQ(describe(dispatch_call()),
            "dispatch(bf16, hidden 7168, top-8, 256 experts, max_tokens 128, quant fp8, 224 bytes of scales a row)");
  OpHeader call = dispatch_call();
  call.words[OpHeader::kOperation] = pack_operation(Operation::kHtCombine, DType::kF16, Quant::kNone, DType::kF32);
  EXPECT_EQ(
      describe(call),
      "high-throughput combine(fp16, hidden 7168, top-8, 256 experts, max_tokens 128, wire fp32, with a scalar for "
      "each choice, as gradients of weights are)");
  call.words[OpHeader::kScaleBytes] = 0;
  EXPECT_EQ(describe(call),
            "high-throughput combine(fp16, hidden 7168, top-8, 256 experts, max_tokens 128, wire fp32)");
  call.words[OpHeader::kOperation] = pack_operation(Operation::kCombine, DType::kF16, Quant::kNone, DType::kF32);
  call.words[OpHeader::kLlHandle] = tag_of(9);
  EXPECT_EQ(describe(call), "combine(fp16, hidden 7168, top-8, 256 experts, max_tokens 128, wire fp32)");
  call.words[OpHeader::kOperation] =
      pack_operation(Operation::kCombineWeighted, DType::kF16, Quant::kNone, DType::kF32);
  EXPECT_EQ(describe(call).find("combine with weights of the home rank("), 0u);
  EXPECT_FALSE(is_high_throughput(call));
  call.words[OpHeader::kOperation] =
      pack_operation(Operation::kCombineUnweighted, DType::kF16, Quant::kNone, DType::kF16);
  EXPECT_EQ(describe(call).find("split combine with weights of the home rank("), 0u);
  EXPECT_FALSE(is_high_throughput(call));
  call.words[OpHeader::kOperation] =
      pack_operation(Operation::kDispatchAllWeights, DType::kF16, Quant::kFp8, DType::kF16);
  EXPECT_EQ(describe(call).find("dispatch with all weights(fp16, "), 0u);
  EXPECT_NE(describe(call).find("quant fp8, "), std::string::npos);
  call.words[OpHeader::kOperation] =
      pack_operation(Operation::kHtCombineWeights, DType::kF32, Quant::kNone, DType::kF32);
  EXPECT_TRUE(is_high_throughput(call));
  call.words[OpHeader::kOperation] = pack_operation(Operation::kCombineWeights, DType::kF32, Quant::kNone, DType::kF32);
  EXPECT_EQ(describe(call).find("combine of weights("), 0u);
}

// A peer's record may hold anything; the sentence about it must not read past its tables.
TEST(Describe, NonsenseFromAPeerIsTold) {
  for (uint32_t operation : {0u, 5u, 0xFFFFFFFFu, 0xFFFFFF01u, 0xFFFFFF02u, 0x80808080u}) {
    OpHeader call = dispatch_call();
    call.words[OpHeader::kOperation] = operation;
    EXPECT_NE(describe(call), "");
  }
}

TEST(Describe, AFailureIsToldWithRankAndOperation) {
  Failure failure;
  failure.code = Failure::kTimeout;
  failure.kind = Kind::kCombine;
  failure.awaited = Awaited::kPartials;
  failure.peer = 3;
  failure.epoch = 12;
  failure.expected = 7;
  failure.seen = 6;
  EXPECT_EQ(describe(failure, 1, 2.5),
            "rank 1 waited 2.5 s for the partial sums of rank 3 in combine 12 (expected 7, saw 6)");
  failure.seen = 7;
  EXPECT_EQ(describe(failure, 1, 2.5).find("expected"), std::string::npos) << "where both are the same";
  for (int rank : {3, 5, 63, 64, 1151}) failure.missing.add(rank);
  EXPECT_NE(describe(failure, 1, 2.5).find("; nothing of this call was heard from rank 3, 5, 63, 64, 1151"),
            std::string::npos);
  for (int rank = 72; rank < 144; rank++) failure.missing.add(rank);
  EXPECT_NE(describe(failure, 1, 2.5).find(" from rank 3, 5, 63, 64, 72 to 143, 1151"), std::string::npos);
  failure.code = Failure::kOtherOp;
  failure.mine = failure.theirs = dispatch_call();
  failure.theirs.words[OpHeader::kHidden] = 4096;
  const std::string text = describe(failure, 1, 2.5);
  EXPECT_EQ(text.find("ranks made different calls in combine 12: rank 1 called dispatch(bf16, hidden 7168"), 0u)
      << text;
  EXPECT_NE(text.find("rank 3 called dispatch(bf16, hidden 4096"), std::string::npos) << text;
  failure.code = Failure::kOtherHandle;
  failure.is_ht = 1;
  failure.expected = tag_of(9);
  failure.seen = tag_of(10);
  EXPECT_EQ(describe(failure, 1, 2.5),
            "ranks gave handles of different dispatches to high-throughput combine 12: rank 1 that of dispatch 9, rank "
            "3 that of dispatch 10");
  failure.seen = 0;
  EXPECT_NE(describe(failure, 1, 2.5).find("rank 3 that of no dispatch"), std::string::npos);
  failure.is_ht = 0;
  EXPECT_EQ(describe(failure, 1, 2.5).find("ranks gave handles of different dispatches to combine 12: rank 1"), 0u);
  EXPECT_EQ(kind_of(failure), ErrorKind::kMismatch);
}

RankMask mask_of(std::initializer_list<int> ranks) {
  RankMask mask;
  for (int rank : ranks) mask.add(rank);
  return mask;
}

TEST(Describe, AFailureIsToldWithItsNode) {
  const Topology topology = Topology::make(64, 2);
  Failure failure;
  EXPECT_EQ(node_of(failure, topology), "");
  failure.peer = 3;
  EXPECT_EQ(node_of(failure, topology), "; rank 3 is on node 1");
  EXPECT_EQ(node_of(failure, Topology::make(64, 64)), "");
  failure.missing = mask_of({0, 3});
  EXPECT_EQ(node_of(failure, topology), "; rank 3 is on node 1");
  failure.missing = mask_of({2, 3});
  EXPECT_EQ(node_of(failure, topology), "; rank 3 is on node 1, of which no rank was heard");
  failure.peer = 63;
  failure.missing = mask_of({62, 63});
  EXPECT_EQ(node_of(failure, topology), "; rank 63 is on node 31, of which no rank was heard");
  failure.peer = 70;
  failure.missing = {};
  for (int rank = 72; rank < 144; rank++) failure.missing.add(rank);
  EXPECT_EQ(node_of(failure, Topology::make(144, 72)), "; rank 70 is on node 0");
  failure.peer = 100;
  EXPECT_EQ(node_of(failure, Topology::make(144, 72)), "; rank 100 is on node 1, of which no rank was heard");
}

}  // namespace
}  // namespace ep
