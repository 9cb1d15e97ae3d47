// A rank that is silent, leaves, or calls something else: the others end within their deadline and say who and what.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "unit/errors.h"
#include "world.h"

namespace ep {
namespace {

constexpr double kPatience = 60;
// Of ranks that wait for rank 2. Where another of them came too late, which a busy machine does as well as a mistake,
// all is repeated with the next.
constexpr double kDeadlines[] = {0.5, 4, 30};
const char* const kLate = "a living rank came too late: ";

// Tensors of a dispatch of two tokens a rank to every rank, and the combine after it.
class Call {
 public:
  explicit Call(int num_ranks) : num_ranks_(num_ranks), x_(2 * 4), sums_(2 * 4) {
    for (int token = 0; token < 2; token++) {
      for (int rank = 0; rank < num_ranks; rank++) ids_.push_back(rank);
    }
    dispatch_.shape = Shape{num_ranks, num_ranks, num_ranks, 2};
    dispatch_.dtype = DType::kF32;
    dispatch_.hidden = 4;
    dispatch_.num_tokens = 2;
    dispatch_.output = {OutputLayout::kExpertMajor, num_ranks, 1, 2, num_ranks, 2 * num_ranks, 1};
    const HandleShape sizes{num_ranks, 2, 2, num_ranks, num_ranks};
    handle_.resize(sizes.size());
    dispatch_.handle = HandlePtrs::of(handle_.data(), sizes);
    rows_.resize(2 * num_ranks * 4);
    weights_.resize(2 * num_ranks);
    info_.assign(dispatch_.output.info_size(), 77);
  }

  void dispatch(Group& group, Phase phase = Phase::kFused) {
    LlDispatchParams p = dispatch_;
    p.phase = phase;
    p.x = x_.data();
    p.topk_idx = ids_.data();
    p.out_x = rows_.data();
    p.out_weights = weights_.data();
    p.info = info_.data();
    group.dispatch(p, nullptr);
  }
  void combine(Group& group, Weighting weighting = Weighting::kNone, Phase phase = Phase::kFused) {
    LlCombineParams p;
    p.shape = dispatch_.shape;
    p.dtype = p.options.wire_dtype = p.options.out_dtype = DType::kF32;
    p.hidden = 4;
    p.rows = rows_.data();
    p.output = dispatch_.output;
    p.handle = dispatch_.handle;
    p.options.weighting = weighting;
    home_weights_.assign(2 * num_ranks_, 1.0f);
    p.home_weights = home_weights_.data();
    p.num_tokens = 2;
    p.out = sums_.data();
    p.phase = phase;
    group.combine(p, nullptr);
  }
  LlDispatchParams& params() { return dispatch_; }
  const std::vector<int32_t>& info() const { return info_; }

 private:
  const int num_ranks_;
  LlDispatchParams dispatch_;
  std::vector<float> x_, rows_, weights_, home_weights_, sums_;
  std::vector<int64_t> ids_;
  std::vector<int32_t> handle_, info_;
};

std::unique_ptr<Group> make_group(Bootstrap& bootstrap, int domain_size) {
  GroupConfig config;
  config.domain_size = domain_size;
  config.timeout_seconds = kPatience;
  config.network_seed = 3;
  config.sizes = sizes_for({bootstrap.num_ranks(), bootstrap.num_ranks(), bootstrap.num_ranks(), 2}, 64, 64);
  return make_cpu_group(bootstrap, config);
}

// What the call says, which must end with this kind of error.
template <class Body>
std::string text_of(ErrorKind kind, Body body) {
  try {
    body();
  } catch (const Error& error) {
    require(error.kind() == kind, concat("another kind of error: ", error.what()));
    return error.what();
  }
  throw std::runtime_error("no error");
}

template <class Body>
void require_mismatch(const std::vector<std::string>& parts, Body body) {
  const std::string text = text_of(ErrorKind::kMismatch, body);
  for (const std::string& part : parts) require(text.find(part) != text.npos, "'" + part + "' is not in: " + text);
}

// How a text ends that misses rank 2 alone: of several nodes it names that of rank 2, and whether others of it were
// heard.
std::string misses_rank_2(const Topology& topology) {
  const std::string alone = "nothing of this call was heard from rank 2";
  if (topology.num_domains() == 1) return alone;
  return concat(alone, "; rank 2 is on node ", topology.domain_of(2),
                topology.domain_size == 1 ? ", of which no rank was heard" : "");
}

// The call misses rank 2 alone, and not before the deadline or long after it.
template <class Body>
void require_missed(Group& group, double deadline, const std::string& call, Body body) {
  group.set_timeout(deadline);
  const auto start = std::chrono::steady_clock::now();
  const std::string text = text_of(ErrorKind::kTimeout, body);
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
  const bool is_alone = text.find(" of rank 2 in ") != text.npos && text.ends_with(misses_rank_2(group.topology()));
  require(is_alone, kLate + text);
  require(text.find(" of rank 2 in " + call + " ") != text.npos, "not " + call + ": " + text);
  require(passed.count() > deadline * 0.9, concat("after ", passed.count(), " s"));
  require(passed.count() < deadline + kPatience / 2, concat("it took ", passed.count(), " s"));
}

// What ranks find after a failure; they stay until everybody is done. Then a new group must work.
void go_on(Bootstrap& bootstrap, std::unique_ptr<Group> group, Call& call) {
  if (group->rank() != 2) {
    require(error_of([&] { group->check(); }).find("the buffer has failed: ") == 0, "check()");
    require(error_of([&] { call.dispatch(*group); }).find("the buffer has failed: ") == 0, "next call");
    require(error_of([&] { call.combine(*group); }) != "", "next combine");
  }
  bootstrap.allgather("ended");
  const int domain_size = group->topology().domain_size;
  group.reset();
  group = make_group(bootstrap, domain_size);
  Call again(4);
  again.dispatch(*group);
  again.combine(*group);
  require(again.info()[0] == 8, "the new group");
}

class Failures : public ::testing::TestWithParam<int> {  // the domain size, of 4 ranks
 protected:
  // Rank 2 does `victim` and no more. The others do `before`, and then what misses it: `survivor`, with a deadline.
  template <class Victim, class Before, class Survivor>
  void miss(Victim victim, Before before, Survivor survivor) {
    std::string problems;
    for (double deadline : kDeadlines) {
      problems = joined(on_ranks([&](Bootstrap& bootstrap, Group& group, Call& call) {
        bootstrap.rank() == 2 ? victim(group, call) : before(group, call);
        bootstrap.allgather("ready");
        if (bootstrap.rank() != 2) survivor(group, call, deadline);
      }));
      if (problems.find(kLate) == problems.npos) break;
    }
    EXPECT_EQ(problems, "");
  }

  // Rank 2 makes another call than the others.
  template <class Odd, class Usual>
  void differ(Odd odd, Usual usual) {
    EXPECT_EQ(joined(on_ranks([&](Bootstrap& bootstrap, Group& group, Call& call) {
                bootstrap.rank() == 2 ? odd(group, call) : usual(group, call);
              })),
              "");
  }

 private:
  template <class Body>
  std::vector<std::string> on_ranks(Body body) {
    return run_ranks(4, [&](Bootstrap& bootstrap) {
      auto group = make_group(bootstrap, GetParam());
      Call call(4);
      call.dispatch(*group);
      call.combine(*group);
      body(bootstrap, *group, call);
      go_on(bootstrap, std::move(group), call);
    });
  }
};

TEST_P(Failures, SilentBeforeDispatch) {
  miss([](Group&, Call&) {}, [](Group&, Call&) {},
       [](Group& group, Call& call, double deadline) {
         require_missed(group, deadline, "dispatch 2", [&] { call.dispatch(group); });
         for (int32_t value : call.info()) require(value == 0, "counts of a failed dispatch");
       });
}

TEST_P(Failures, SilentBeforeCombine) {
  const auto dispatch = [](Group& group, Call& call) { call.dispatch(group); };
  miss(dispatch, dispatch, [](Group& group, Call& call, double deadline) {
    require_missed(group, deadline, "combine 2", [&] { call.combine(group); });
  });
}

TEST_P(Failures, SilentBeforeWeightedCombine) {
  const auto dispatch = [](Group& group, Call& call) { call.dispatch(group); };
  miss(dispatch, dispatch, [](Group& group, Call& call, double deadline) {
    require_missed(group, deadline, "combine 2", [&] { call.combine(group, Weighting::kHome); });
  });
}

// A rank that sends and then never reads: the others finish that call, and miss it in the next.
TEST_P(Failures, SilentAfterItsSend) {
  miss([](Group& group, Call& call) { call.dispatch(group, Phase::kSend); },
       [](Group& group, Call& call) {
         call.dispatch(group);
         require(call.info()[0] == 8, "the call that was sent is complete");
       },
       [](Group& group, Call& call, double deadline) {
         require_missed(group, deadline, "dispatch 3", [&] { call.dispatch(group); });
       });
}

TEST_P(Failures, AnotherCallNamesBoth) {
  differ(
      [](Group& group, Call& call) {
        call.params().options.quant = Quant::kNone;
        call.params().dtype = DType::kOpaque32;
        require_mismatch({"rank 2 called dispatch(32 bits", "dispatch(fp32"}, [&] { call.dispatch(group); });
      },
      [](Group& group, Call& call) {
        require_mismatch(
            {"ranks made different calls in dispatch 2", "called dispatch(fp32, hidden 4, top-4, 4 experts",
             "rank 2 called dispatch(32 bits, hidden 4"},
            [&] { call.dispatch(group); });
      });
}

TEST_P(Failures, WeightedAndPlainCombineDiffer) {
  differ(
      [](Group& group, Call& call) {
        call.dispatch(group);
        require_mismatch({"rank 2 called combine("}, [&] { call.combine(group); });
      },
      [](Group& group, Call& call) {
        call.dispatch(group);
        require_mismatch({"rank 2 called combine(", "combine with weights of the home rank("},
                         [&] { call.combine(group, Weighting::kHome); });
      });
}

INSTANTIATE_TEST_SUITE_P(Domains, Failures, ::testing::Values(4, 2, 1));

// Another thread ends what a rank waits for: by destroying the group, or by a shorter timeout.
class Ended : public ::testing::TestWithParam<int> {
 protected:
  // Rank 0 calls `waits` alone, and a thread of it `ends` the wait. Where it came before the wait, it comes later next
  // time.
  template <class Ends, class Waits>
  void expect(ErrorKind kind, const std::string& part, Ends ends, Waits waits) {
    std::string problems;
    for (const int pause : {50, 1000, 10000}) {
      problems = joined(run_ranks(2, [&](Bootstrap& bootstrap) {
        const std::unique_ptr<Group> group = make_group(bootstrap, GetParam());
        Call call(2);
        call.dispatch(*group);
        if (bootstrap.rank() == 0) {
          std::thread other([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(pause));
            ends(*group);
          });
          const std::string text = text_of(kind, [&] { waits(*group, call); });
          other.join();
          require(text.find(part) != text.npos, kLate + text);
        }
        bootstrap.allgather("ended");
      }));
      if (problems.find(kLate) == problems.npos) break;
    }
    EXPECT_EQ(problems, "");
  }
};

TEST_P(Ended, ByDestroy) {
  const auto destroy = [](Group& group) { group.destroy(); };
  const auto text = [](const char* call) { return concat("by another thread while rank 0 waited for the ", call); };
  const std::string first = GetParam() == 2 ? "op header" : "arrival signal";
  expect(ErrorKind::kInvalidUsage, text((first + " of rank 1 in dispatch 2").c_str()), destroy,
         [](Group& group, Call& call) { call.dispatch(group); });
  expect(ErrorKind::kInvalidUsage, text((first + " of rank 1 in combine 1").c_str()), destroy,
         [](Group& group, Call& call) { call.combine(group); });
}

TEST_P(Ended, ByAShorterTimeout) {
  expect(
      ErrorKind::kTimeout, " s, with a timeout that was changed to 0.01 s meanwhile, for the ",
      [](Group& group) { group.set_timeout(0.01); }, [](Group& group, Call& call) { call.dispatch(group); });
}

INSTANTIATE_TEST_SUITE_P(Domains, Ended, ::testing::Values(2, 1));

// A call that is refused sends nothing and changes nothing: the next good one works.
TEST(Refusals, LeaveTheGroupUsable) {
  EXPECT_EQ(
      joined(run_ranks(
          2,
          [](Bootstrap& bootstrap) {
            const auto group = make_group(bootstrap, 2);
            const auto refuse = [&](const char* text, auto change) {
              Call bad(2);
              change(bad.params());
              const std::string error = error_of([&] { bad.dispatch(*group); });
              require(error.find(text) != error.npos, concat("'", text, "' is not in '", error, "'"));
            };
            if (bootstrap.rank() == 0) {  // the other rank sees none of it
              refuse("3 tokens, but max_tokens is 2", [](LlDispatchParams& p) { p.num_tokens = 3; });
              refuse("3 experts do not divide over 2 ranks", [](LlDispatchParams& p) { p.shape.num_experts = 3; });
              refuse("a row of 12 bytes: must be a multiple of 16", [](LlDispatchParams& p) { p.hidden = 3; });
              refuse("the window is too small", [](LlDispatchParams& p) { p.hidden = 4096; });
              refuse("only bf16 and fp16 are quantised", [](LlDispatchParams& p) { p.options.quant = Quant::kFp8; });
              refuse("capacity is -1", [](LlDispatchParams& p) { p.output.capacity = -1; });
              refuse("capacity is 4611686018427387904", [](LlDispatchParams& p) { p.output.capacity = 1ll << 62; });
            }
            Call good(2);
            if (bootstrap.rank() == 0) {
              const std::string error = error_of([&] { good.dispatch(*group, Phase::kRecv); });
              require(error == "dispatch: nothing was sent that could be received", error);
            }
            good.dispatch(*group, Phase::kSend);
            const std::string second = error_of([&] { good.dispatch(*group); });
            require(second.find("dispatch 1 was sent and has not been received") == 0, second);
            good.dispatch(*group, Phase::kRecv);
            good.combine(*group);
            require(good.info()[0] == 4, "counts");
            group->destroy();
            require(error_of([&] { good.dispatch(*group); }) == "the buffer was destroyed", "destroyed");
          })),
      "");
}

}  // namespace
}  // namespace ep
