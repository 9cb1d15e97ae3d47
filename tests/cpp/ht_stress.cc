#include "ht_stress.h"

#include <array>
#include <memory>
#include <vector>

#include "base/testing.h"
#include "stress.h"
#include "trip.h"
#include "world.h"

namespace ep {
namespace {

// A block of the arena, or of the heap where the test wants that or the arena is full.
struct Block {
  std::shared_ptr<void> memory;
  std::vector<char> heap;

  static Block make(Group& group, uint64_t bytes, bool wants_arena) {
    Block block;
    if (wants_arena && bytes > 0) block.memory = Arena::take(group.arena(), bytes);
    if (block.memory == nullptr) block.heap.resize(bytes + 16);
    return block;
  }
  template <class T>
  T* as() {
    return memory != nullptr ? static_cast<T*>(memory.get()) : reinterpret_cast<T*>(heap.data());
  }
};

// One round in high throughput.
class HtTrip : public Trip {
 public:
  HtTrip(Group& group, const Round& round) : Trip(round, group.rank(), true), group_(group) {
    output_ = round.output;
    is_exact_ = round.index % 3 == 1 &&
                (output_.layout == OutputLayout::kPacked || output_.layout == OutputLayout::kFlat) && fits();
  }

  void dispatch() {
    fill_inputs();
    HtDispatchParams p = params();
    p.topk_idx = ids_.data();
    p.topk_weights = weights_.data();
    info_.assign(output_.info_size(), -7);
    p.info = info_.data();
    const HtHandleShape sizes = handle_shape(0);
    route_.assign(sizes.route_size(), 0x55555555);
    if (is_exact_) {
      std::vector<int64_t> received(2 + output_.local_experts, -1);
      p.variant = HtVariant::kRoute;
      p.output.capacity = INT32_MAX;
      p.host_sizes = received.data();
      p.handle = HtHandlePtrs::of(route_.data(), nullptr, sizes);
      group_.dispatch(p, nullptr);
      p.variant = HtVariant::kSend;
      const int64_t needed = expected_[rank_].starts.back();
      require(received[0] == needed, round_, received[0], " rows are to come, not ", needed);
      p.output.capacity = received[0];
      num_slots_ = received[1];
    } else {
      num_slots_ = static_cast<int64_t>(output_.num_ranks) * output_.max_tokens;
    }
    // Outputs keep the round's rows even where exact sizes ask for fewer.
    allocate_outputs(p);
    group_.dispatch(p, nullptr);
    output_.capacity = p.output.capacity;
    spoil_inputs();
    check_dispatch(rows_out_.as<uint32_t>(), scales_out_.as<uint32_t>());
  }

  // The same rows again: what lies there afterwards is what lay there before.
  void dispatch_again() {
    x_.clear(), scales_.clear(), ids_.clear(), weights_.clear();
    fill_inputs();
    HtDispatchParams p = params();
    p.variant = HtVariant::kCached;
    p.handle = handle();
    p.output = output_;
    rows_out_ = Block::make(group_, round_.output.rows() * round_.row_words * 4, coin(11));
    scales_out_ = Block::make(group_, round_.output.rows() * round_.num_scales * 4, coin(12));
    set_outputs(p);
    group_.dispatch(p, nullptr);
    spoil_inputs();
    check_dispatch(rows_out_.as<uint32_t>(), scales_out_.as<uint32_t>());
  }

  void combine() {
    const bool with_scalars = round_.sends_scalars;
    rows_in_ = Block::make(group_, round_.output.rows() * round_.hidden * 4, coin(13));
    fill_rows(rows_in_.as<float>());
    const std::vector<float> values = scalars_to_send();
    std::vector<float> scalars(static_cast<size_t>(num_tokens_) * round_.shape.topk, -12345.0f);
    HtCombineParams p;
    p.shape = round_.shape;
    p.dtype = p.options.wire_dtype = p.options.out_dtype = DType::kF32;
    p.hidden = round_.hidden;
    p.rows = rows_in_.as<float>();
    p.output = output_;
    p.handle = handle();
    p.options.weighting = round_.weighting;
    p.home_weights = weights_.data();
    p.home_topk_idx = ids_.data();
    p.num_tokens = num_tokens_;
    p.has_values = with_scalars;
    p.values = values.data();
    p.out_values = scalars.data();
    sums_.assign(static_cast<size_t>(num_tokens_) * round_.hidden, -12345.0f);
    p.out = sums_.data();
    group_.combine(p, nullptr);
    // The input is the caller's again.
    std::fill_n(rows_in_.as<float>(), round_.output.rows() * round_.hidden, 99999.0f);
    check_combine();
    if (with_scalars) check_scalars(scalars);
  }

 private:
  bool coin(int what) const {
    return hash_of({round_.seed, static_cast<uint64_t>(round_.index), 77u, static_cast<uint64_t>(rank_ + 100 * what)}) %
               4 !=
           0;
  }

  // On every rank, padding included, so that all ask for exact sizes or none.
  bool fits() const {
    for (const Expected& each : expected_) {
      if (each.starts.back() > round_.output.capacity) return false;
    }
    return true;
  }

  HtHandleShape handle_shape(int64_t num_slots) const {
    return HtHandleShape::make(output_, group_.topology(), num_tokens_, num_slots);
  }
  HtHandlePtrs handle() { return HtHandlePtrs::of(route_.data(), slots_.data(), handle_shape(num_slots_)); }

  HtDispatchParams params() {
    HtDispatchParams p;
    p.shape = round_.shape;
    p.dtype = round_.dtype;
    p.hidden = round_.elements();
    p.num_tokens = num_tokens_;
    p.output = output_;
    const auto add = [&](const uint32_t* in, int words) { p.parts[p.num_parts++] = HtPart::contiguous(in, words * 4); };
    add(x_.data(), round_.row_words);
    if (round_.num_scales > 0) add(scales_.data(), round_.num_scales);
    return p;
  }

  void set_outputs(HtDispatchParams& p) {
    p.parts[0].out = rows_out_.as<void>();
    if (round_.num_scales > 0) p.parts[1].out = scales_out_.as<void>();
  }

  void allocate_outputs(HtDispatchParams& p) {
    const int64_t rows = round_.output.rows();
    rows_out_ = Block::make(group_, rows * round_.row_words * 4, coin(1));
    scales_out_ = Block::make(group_, rows * round_.num_scales * 4, coin(2));
    set_outputs(p);
    const int64_t entries = has_expert_rows(output_.layout) ? rows : rows * round_.shape.topk;
    // Beyond exact sizes nothing is written; what would be there is known.
    out_weights_.assign(entries, is_exact_ ? 0.0f : -7.0f);
    out_ids_.assign(entries, is_exact_ ? -1 : -7);
    row_expert_.assign(rows, is_exact_ ? -1 : -7);
    p.row_expert = output_.layout == OutputLayout::kPacked ? row_expert_.data() : nullptr;
    p.out_topk_idx = out_ids_.data();
    p.out_weights = out_weights_.data();
    slots_.assign(num_slots_ * handle_shape(num_slots_).slot_words() + 1, 0x55555555);
    p.handle = handle();
  }

  Group& group_;
  OutputShape output_;
  bool is_exact_ = false;
  int64_t num_slots_ = 0;
  Block rows_out_, scales_out_, rows_in_;
  std::vector<int32_t> route_, slots_;
};

void run_rounds(Group& group, const HtStressConfig& config) {
  using Mode = HtStressConfig::Mode;
  const int handles = config.mode == Mode::kInRow ? 5 : 1;
  for (int first = 0; first < config.rounds; first += handles) {
    std::vector<std::unique_ptr<HtTrip>> trips;
    for (int i = 0; i < handles; i++) {
      const Round round = Round::make(config.seed, first + i, config.num_ranks, config.same_shape);
      trips.push_back(std::make_unique<HtTrip>(group, round));
      trips.back()->dispatch();
      if (config.mode == Mode::kMixed) run_ll_round(group, round);
    }
    for (const auto& trip : trips) {
      for (int i = 0; i < 2 && config.mode == Mode::kCached; i++) trip->dispatch_again();
      trip->combine();
    }
  }
}

}  // namespace

void run_ht_stress_rank(Bootstrap& bootstrap, const HtStressConfig& config) {
  const Shape largest{config.num_ranks, config.num_ranks * Round::kMaxLocalExperts, Round::kMaxTopk, Round::kMaxTokens};
  GroupConfig group_config;
  group_config.domain_size = config.domain_size;
  const int row_bytes = (Round::kMaxRowWords + Round::kMaxScales) * 4 + 16;
  if (config.mode == HtStressConfig::Mode::kMixed) group_config.sizes = sizes_for(largest, row_bytes, 4 * 8 * 4);
  // Room for some outputs, not for all of a long row of dispatches.
  group_config.ht_sizes =
      ht_sizes_for(Topology::make(config.num_ranks, config.domain_size), largest, row_bytes, 4 * 8 * 4, 1 << 17);
  group_config.timeout_seconds = config.timeout_seconds;
  group_config.network_seed = config.network_seed;
  const auto group = make_cpu_group(bootstrap, group_config);
  run_rounds(*group, config);
}

std::string run_ht_stress(const HtStressConfig& config) {
  testing::set_delays(config.delay_seed);
  const auto problems =
      run_ranks(config.num_ranks, [&](Bootstrap& bootstrap) { run_ht_stress_rank(bootstrap, config); });
  testing::set_delays(0);
  return joined(problems);
}

}  // namespace ep
