#include "stress.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/testing.h"
#include "trip.h"
#include "world.h"

namespace ep {
namespace {

// One round in low latency.
class LlTrip : public Trip {
 public:
  LlTrip(Group& group, const Round& round) : Trip(round, group.rank(), false), group_(group) {
    const OutputShape& output = round.output;
    const HandleShape sizes{output.num_ranks, num_tokens_, output.max_tokens, output.topk, output.map_k()};
    handle_.assign(sizes.size(), 0x55555555);
    handle_ptrs_ = HandlePtrs::of(handle_.data(), sizes);
  }

  void dispatch(Phase phase) {
    if (sends(phase)) fill_inputs();
    LlDispatchParams p = dispatch_params();
    p.phase = phase;
    if (receives(phase)) allocate_outputs(p);
    group_.dispatch(p, nullptr);
    if (sends(phase)) spoil_inputs();
    if (receives(phase)) check_dispatch(out_x_.data(), out_scales_.data());
  }

  void combine(Phase phase) {
    if (sends(phase)) {
      rows_.resize(round_.output.rows() * round_.hidden);
      fill_rows(rows_.data());
    }
    LlCombineParams p;
    p.shape = round_.shape;
    p.phase = phase;
    p.dtype = p.options.wire_dtype = p.options.out_dtype = DType::kF32;
    p.hidden = round_.hidden;
    p.rows = rows_.data();
    p.output = round_.output;
    p.handle = handle_ptrs_;
    p.options.weighting = round_.weighting;
    p.home_weights = weights_.data();
    p.home_topk_idx = ids_.data();
    p.num_tokens = num_tokens_;
    if (receives(phase)) sums_.assign(static_cast<size_t>(num_tokens_) * round_.hidden, -12345.0f);
    p.out = sums_.data();
    group_.combine(p, nullptr);
    if (sends(phase)) {
      rows_.assign(rows_.size(), 99999.0f);
      weights_.assign(weights_.size(), 99999.0f);
    }
    if (receives(phase)) check_combine();
  }

  void combine_weights() {
    const std::vector<float> values = scalars_to_send();
    std::vector<float> scalars(static_cast<size_t>(num_tokens_) * round_.shape.topk, -12345.0f);
    LlCombineWeightsParams p;
    p.shape = round_.shape;
    p.output = round_.output;
    p.handle = handle_ptrs_;
    p.values = values.data();
    p.num_tokens = num_tokens_;
    p.out = scalars.data();
    group_.combine_weights(p, nullptr);
    check_scalars(scalars);
  }

 private:
  LlDispatchParams dispatch_params() {
    LlDispatchParams p;
    p.shape = round_.shape;
    p.dtype = round_.dtype;
    p.hidden = round_.elements();
    p.x = x_.data();
    if (round_.num_scales > 0) p.scales = {scales_.data(), round_.num_scales, 1, round_.num_scales, 4};
    p.topk_idx = ids_.data();
    p.topk_weights = weights_.data();
    p.num_tokens = num_tokens_;
    p.output = round_.output;
    p.out_scales.count = round_.num_scales;
    p.handle = handle_ptrs_;
    return p;
  }

  void allocate_outputs(LlDispatchParams& p) {
    const int64_t rows = round_.output.rows();
    out_x_.assign(rows * round_.row_words, 0x77777777);
    out_scales_.assign(rows * round_.num_scales, 0x77777777);
    const int64_t entries = has_expert_rows(round_.output.layout) ? rows : rows * round_.shape.topk;
    out_weights_.assign(entries, -7);
    out_ids_.assign(entries, -7);
    row_expert_.assign(rows, -7);
    info_.assign(round_.output.info_size(), -7);
    p.out_x = out_x_.data();
    if (round_.num_scales > 0) p.out_scales = {out_scales_.data(), round_.num_scales, 1, round_.num_scales, 4};
    p.info = info_.data();
    p.row_expert = round_.output.layout == OutputLayout::kPacked ? row_expert_.data() : nullptr;
    p.out_topk_idx = out_ids_.data();
    p.out_weights = out_weights_.data();
  }

  Group& group_;
  std::vector<uint32_t> out_x_, out_scales_;
  std::vector<float> rows_;
  std::vector<int32_t> handle_;
  HandlePtrs handle_ptrs_;
};

// The second send carries another round's rows: nothing of them may reach anybody.
void require_refused_send(Group& group, const Round& round, const Round& other) {
  LlTrip trip(group, other);
  try {
    trip.dispatch(Phase::kSend);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidUsage, round, "a second send fails with: ", error.what());
    return;
  }
  require(false, round, "a second send was accepted before the first was received");
}

void run_in_row(Group& group, const StressConfig& config) {
  constexpr int kHandles = 5;
  for (int first = 0; first < config.rounds; first += kHandles) {
    std::vector<std::unique_ptr<LlTrip>> trips;
    for (int i = 0; i < kHandles; i++) {
      trips.push_back(
          std::make_unique<LlTrip>(group, Round::make(config.seed, first + i, config.num_ranks, config.same_shape)));
      trips.back()->dispatch(Phase::kFused);
    }
    for (const auto& trip : trips) trip->combine(Phase::kFused);
    for (const auto& trip : trips) {
      if (trip->round().sends_scalars) trip->combine_weights();
    }
  }
}

void run_rounds(Group& group, const StressConfig& config) {
  using Mode = StressConfig::Mode;
  const auto begin = [&](int index) {
    return std::make_unique<LlTrip>(group, Round::make(config.seed, index, config.num_ranks, config.same_shape));
  };
  std::unique_ptr<LlTrip> next = begin(0);
  if (config.mode == Mode::kPipelined) next->dispatch(Phase::kFused);
  for (int index = 0; index < config.rounds; index++) {
    std::unique_ptr<LlTrip> trip = std::move(next);
    next = begin(index + 1);
    switch (config.mode) {
      case Mode::kFused:
        trip->dispatch(Phase::kFused);
        trip->combine(Phase::kFused);
        break;
      case Mode::kStaged:
        trip->dispatch(Phase::kSend);
        if (config.tries_second_send) require_refused_send(group, trip->round(), next->round());
        trip->dispatch(Phase::kRecv);
        trip->combine(Phase::kSend);
        trip->combine(Phase::kRecv);
        break;
      case Mode::kPipelined:
        next->dispatch(Phase::kSend);
        trip->combine(Phase::kSend);
        next->dispatch(Phase::kRecv);
        trip->combine(Phase::kRecv);
        break;
      case Mode::kInRow:
        break;  // see run_in_row
    }
    if (trip->round().sends_scalars) trip->combine_weights();
  }
}

}  // namespace

void run_ll_round(Group& group, const Round& round) {
  LlTrip trip(group, round);
  trip.dispatch(Phase::kFused);
  trip.combine(Phase::kFused);
}

void run_stress_rank(Bootstrap& bootstrap, const StressConfig& config) {
  const Shape largest{config.num_ranks, config.num_ranks * Round::kMaxLocalExperts, Round::kMaxTopk, Round::kMaxTokens};
  GroupConfig group_config;
  group_config.domain_size = config.domain_size;
  group_config.sizes = sizes_for(largest, (Round::kMaxRowWords + Round::kMaxScales) * 4, 4 * 8 * 4);
  group_config.timeout_seconds = config.timeout_seconds;
  group_config.network_seed = config.network_seed;
  const auto group = make_cpu_group(bootstrap, group_config);
  if (config.mode == StressConfig::Mode::kInRow) {
    run_in_row(*group, config);
  } else {
    run_rounds(*group, config);
  }
}

std::string run_stress(const StressConfig& config) {
  testing::set_delays(config.delay_seed);
  const auto problems = run_ranks(config.num_ranks, [&](Bootstrap& bootstrap) { run_stress_rank(bootstrap, config); });
  testing::set_delays(0);
  return joined(problems);
}

}  // namespace ep
