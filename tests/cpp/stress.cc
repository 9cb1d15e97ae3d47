#include "stress.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/testing.h"
#include "round.h"
#include "world.h"

namespace ep {
namespace {

template <class... Parts>
void require(bool condition, const Round& round, Parts&&... parts) {
  if (condition) return;
  throw std::runtime_error(concat("round ", round.index, " of seed ", round.seed, " (", name_of(round.output.layout),
                                  ", ", name_of(round.dtype), ", top-", round.shape.topk, ", ", round.shape.num_experts,
                                  " experts): ", std::forward<Parts>(parts)...));
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// One round's tensors on one rank, from dispatch to combine.
class Trip {
 public:
  Trip(Group& group, const Round& round)
      : group_(group), round_(round), rank_(group.rank()), num_tokens_(round.num_tokens(rank_)) {
    for (int r = 0; r < round.shape.num_ranks; r++) expected_.push_back(Expected::make(round, r));
    const OutputShape& output = round.output;
    const HandleShape sizes{output.num_ranks, num_tokens_, output.max_tokens, output.topk, output.map_k()};
    handle_.assign(sizes.size(), 0x55555555);
    handle_ptrs_ = HandlePtrs::of(handle_.data(), sizes);
  }

  void dispatch(Half half) {
    if (sends(half)) fill_inputs();
    LlDispatchParams p = dispatch_params();
    p.half = half;
    if (receives(half)) allocate_outputs(p);
    group_.dispatch(p, nullptr);
    if (sends(half)) spoil_inputs();
    if (receives(half)) check_dispatch();
  }

  void combine(Half half) {
    if (sends(half)) fill_rows();
    LlCombineParams p;
    p.shape = round_.shape;
    p.half = half;
    p.dtype = p.wire_dtype = p.out_dtype = DType::kF32;
    p.hidden = round_.hidden;
    p.rows = rows_.data();
    p.output = round_.output;
    p.handle = handle_ptrs_;
    p.weighting = round_.weighting;
    p.home_weights = weights_.data();
    p.home_topk_idx = ids_.data();
    p.num_tokens = num_tokens_;
    if (receives(half)) sums_.assign(static_cast<size_t>(num_tokens_) * round_.hidden, -12345.0f);
    p.out = sums_.data();
    group_.combine(p, nullptr);
    if (sends(half)) {
      rows_.assign(rows_.size(), 99999.0f);
      weights_.assign(weights_.size(), 99999.0f);
    }
    if (receives(half)) check_combine();
  }

  void combine_weights() {
    const OutputShape& output = round_.output;
    const int topk = round_.shape.topk;
    const bool expert_rows = has_expert_rows(output.layout);
    std::vector<float> values(output.rows() * (expert_rows ? 1 : topk), 99999.0f);
    for (const Expected::Entry& entry : expected_[rank_].entries) {
      for (int k = 0; entry.row >= 0 && k < topk; k++) {
        if (expert_rows && k != entry.k) continue;
        values[expert_rows ? entry.row : entry.row * topk + k] =
            round_.value(rank_, entry.source, entry.token, k, kScalar);
      }
    }
    std::vector<float> scalars(static_cast<size_t>(num_tokens_) * topk, -12345.0f);
    LlCombineWeightsParams p;
    p.shape = round_.shape;
    p.output = output;
    p.handle = handle_ptrs_;
    p.values = values.data();
    p.num_tokens = num_tokens_;
    p.out = scalars.data();
    group_.combine_weights(p, nullptr);
    for (int i = 0; i < num_tokens_ * topk; i++) {
      const int token = i / topk, k = i % topk, owner = owner_of(token, k);
      const bool is_kept = owner >= 0 && expected_[owner].keeps(rank_, token, k);
      const float expected = is_kept ? round_.value(owner, rank_, token, k, kScalar) : 0.0f;
      require(same(scalars[i], expected), round_, "scalar of token ", token, ", k ", k, " is ", scalars[i], ", not ",
              expected);
    }
  }

  const Round& round() const { return round_; }

 private:
  static constexpr int kScalar = 1 << 20;  // an element index that no row has

  int owner_of(int token, int k) const {
    const int32_t id = round_.expert(rank_, token, k);
    return id < 0 ? -1 : id / (round_.shape.num_experts / round_.shape.num_ranks);
  }

  void fill_inputs() {
    for (int token = 0; token < num_tokens_; token++) {
      for (int i = 0; i < round_.row_words; i++) x_.push_back(round_.word(rank_, token, i));
      for (int i = 0; i < round_.num_scales; i++) scales_.push_back(round_.word(rank_, token, round_.row_words + i));
      for (int k = 0; k < round_.shape.topk; k++) {
        ids_.push_back(round_.expert(rank_, token, k));
        weights_.push_back(round_.weight(rank_, token, k));
      }
    }
  }
  void spoil_inputs() {  // they are free as soon as the sending half is done
    x_.assign(x_.size(), 0x5A5A5A5A);
    scales_.assign(scales_.size(), 0x5A5A5A5A);
    ids_.assign(ids_.size(), 0);
    weights_.assign(weights_.size(), 99999.0f);
  }

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

  void check_info() const {
    const Expected& expected = expected_[rank_];
    const size_t bins = expected.counts.size();
    int64_t total = 0;
    for (size_t bin = 0; bin < bins; bin++) {
      require(info_[bin] == expected.counts[bin], round_, "count ", bin, " is ", info_[bin], ", not ",
              expected.counts[bin]);
      require(info_[bins + bin] == expected.demand[bin], round_, "demand ", bin, " is ", info_[bins + bin], ", not ",
              expected.demand[bin]);
      total += expected.counts[bin];
    }
    require(info_[2 * bins] == expected.dropped, round_, "overflow is ", info_[2 * bins], ", not ", expected.dropped);
    require(info_[2 * bins + 1] == total, round_, "total is ", info_[2 * bins + 1], ", not ", total);
    for (size_t bin = 0; round_.output.layout == OutputLayout::kPacked && bin <= bins; bin++) {
      const int64_t offset = std::min(expected.starts[bin], round_.output.capacity);
      require(info_[2 * bins + 2 + bin] == offset, round_, "offset ", bin, " is ", info_[2 * bins + 2 + bin], ", not ",
              offset);
    }
  }

  void check_dispatch() const {
    check_info();
    std::vector<bool> exists(round_.output.rows(), false);
    for (const Expected::Entry& entry : expected_[rank_].entries) {
      if (entry.row < 0) continue;
      exists[entry.row] = true;
      const auto check = [&](const uint32_t* words, int count, int first, const char* what) {
        for (int i = 0; i < count; i++) {
          const uint32_t expected = round_.word_on_arrival(entry.source, entry.token, first + i);
          require(words[i] == expected, round_, what, " ", i, " of row ", entry.row, " (rank ", entry.source,
                  ", token ", entry.token, ") is ", words[i], ", not ", expected);
        }
      };
      check(out_x_.data() + entry.row * round_.row_words, round_.row_words, 0, "word");
      check(out_scales_.data() + entry.row * round_.num_scales, round_.num_scales, round_.row_words, "scale");
      check_row_info(entry);
    }
    for (size_t row = 0; row < exists.size(); row++) {
      if (!exists[row]) check_no_row(row);
    }
  }

  void check_row_info(const Expected::Entry& entry) const {
    const int topk = round_.shape.topk, local_experts = round_.shape.num_experts / round_.shape.num_ranks;
    if (entry.k >= 0) {
      require(out_weights_[entry.row] == round_.weight(entry.source, entry.token, entry.k), round_, "weight of row ",
              entry.row, " is ", out_weights_[entry.row]);
      require(round_.output.layout != OutputLayout::kPacked || row_expert_[entry.row] == entry.bin, round_,
              "expert of row ", entry.row, " is ", row_expert_[entry.row]);
      return;
    }
    for (int k = 0; k < topk; k++) {
      const int32_t id = round_.expert(entry.source, entry.token, k);
      const bool is_here = id >= 0 && id / local_experts == rank_;
      require(out_ids_[entry.row * topk + k] == (is_here ? id - rank_ * local_experts : -1), round_, "id ", k,
              " of row ", entry.row, " is ", out_ids_[entry.row * topk + k]);
      require(out_weights_[entry.row * topk + k] == (is_here ? round_.weight(entry.source, entry.token, k) : 0.0f),
              round_, "weight ", k, " of row ", entry.row, " is ", out_weights_[entry.row * topk + k]);
    }
  }

  void check_no_row(size_t row) const {
    const bool expert_rows = has_expert_rows(round_.output.layout);
    const int entries = expert_rows ? 1 : round_.shape.topk;
    for (int j = 0; j < entries; j++) {
      require(out_weights_[row * entries + j] == 0.0f, round_, "row ", row, " does not exist and has a weight");
      require(expert_rows || out_ids_[row * entries + j] == -1, round_, "row ", row, " does not exist and has an id");
    }
    require(round_.output.layout != OutputLayout::kPacked || row_expert_[row] == -1, round_, "row ", row,
            " is padding and has an expert");
  }

  void fill_rows() {
    rows_.assign(round_.output.rows() * round_.hidden, 99999.0f);
    for (const Expected::Entry& entry : expected_[rank_].entries) {
      for (int i = 0; entry.row >= 0 && i < round_.hidden; i++) {
        rows_[entry.row * round_.hidden + i] = round_.value(rank_, entry.source, entry.token, entry.k, i);
      }
    }
    for (int i = 0; i < num_tokens_ * round_.shape.topk; i++) {
      const int token = i / round_.shape.topk, k = i % round_.shape.topk;
      weights_[i] = round_.home_weight(rank_, token, k);
      ids_[i] = round_.home_skips(rank_, token, k) ? -1 : round_.expert(rank_, token, k);
    }
  }

  float factor(int token, int k) const {
    switch (round_.weighting) {
      case Weighting::kNone:
        return 1.0f;
      case Weighting::kDispatch:
        return round_.weight(rank_, token, k);
      default:
        return round_.home_skips(rank_, token, k) ? 0.0f : round_.home_weight(rank_, token, k);
    }
  }

  float expected_sum(int token, int i) const {
    float sum = 0;
    if (!has_expert_rows(round_.output.layout)) {
      for (int owner = 0; owner < round_.shape.num_ranks; owner++) {
        if (expected_[owner].keeps(rank_, token, -1)) sum += round_.value(owner, rank_, token, -1, i);
      }
      return sum;
    }
    for (int k = 0; k < round_.shape.topk; k++) {
      const int owner = owner_of(token, k);
      const float weight = factor(token, k);  // 0: skipped, not multiplied
      if (owner < 0 || weight == 0 || !expected_[owner].keeps(rank_, token, k)) continue;
      sum += weight * round_.value(owner, rank_, token, k, i);
    }
    return sum;
  }

  void check_combine() const {
    for (int token = 0; token < num_tokens_; token++) {
      for (int i = 0; i < round_.hidden; i++) {
        const float sum = sums_[static_cast<size_t>(token) * round_.hidden + i], expected = expected_sum(token, i);
        require(same(sum, expected), round_, "element ", i, " of the sum of token ", token, " is ", sum, ", not ",
                expected);
      }
    }
  }

  Group& group_;
  const Round round_;
  const int rank_, num_tokens_;
  std::vector<Expected> expected_;  // [R]
  std::vector<uint32_t> x_, scales_, out_x_, out_scales_;
  std::vector<int64_t> ids_, out_ids_;
  std::vector<float> weights_, out_weights_, rows_, sums_;
  std::vector<int32_t> handle_, info_, row_expert_;
  HandlePtrs handle_ptrs_;
};

// The second send carries another round's rows: nothing of them may reach anybody.
void require_refused_send(Group& group, const Round& round, const Round& other) {
  Trip trip(group, other);
  try {
    trip.dispatch(Half::kSend);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidUsage, round, "a second send fails with: ", error.what());
    return;
  }
  require(false, round, "a second send was accepted before the first was received");
}

void run_in_row(Group& group, const StressConfig& config) {
  constexpr int kHandles = 5;
  for (int first = 0; first < config.rounds; first += kHandles) {
    std::vector<std::unique_ptr<Trip>> trips;
    for (int i = 0; i < kHandles; i++) {
      trips.push_back(
          std::make_unique<Trip>(group, Round::make(config.seed, first + i, config.num_ranks, config.same_shape)));
      trips.back()->dispatch(Half::kBoth);
    }
    for (const auto& trip : trips) trip->combine(Half::kBoth);
    for (const auto& trip : trips) {
      if (trip->round().sends_scalars) trip->combine_weights();
    }
  }
}

void run_rounds(Group& group, const StressConfig& config) {
  using Mode = StressConfig::Mode;
  const auto begin = [&](int index) {
    return std::make_unique<Trip>(group, Round::make(config.seed, index, config.num_ranks, config.same_shape));
  };
  std::unique_ptr<Trip> next = begin(0);
  if (config.mode == Mode::kPipelined) next->dispatch(Half::kBoth);
  for (int index = 0; index < config.rounds; index++) {
    std::unique_ptr<Trip> trip = std::move(next);
    next = begin(index + 1);
    switch (config.mode) {
      case Mode::kFused:
        trip->dispatch(Half::kBoth);
        trip->combine(Half::kBoth);
        break;
      case Mode::kStaged:
        trip->dispatch(Half::kSend);
        if (config.tries_second_send) require_refused_send(group, trip->round(), next->round());
        trip->dispatch(Half::kReceive);
        trip->combine(Half::kSend);
        trip->combine(Half::kReceive);
        break;
      case Mode::kPipelined:
        next->dispatch(Half::kSend);
        trip->combine(Half::kSend);
        next->dispatch(Half::kReceive);
        trip->combine(Half::kReceive);
        break;
      case Mode::kInRow:
        break;  // see run_in_row
    }
    if (trip->round().sends_scalars) trip->combine_weights();
  }
}

}  // namespace

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
