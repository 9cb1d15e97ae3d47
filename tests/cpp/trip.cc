#include "trip.h"

#include <algorithm>

namespace ep {
namespace {

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

Trip::Trip(const Round& round, int rank, bool keeps_all_bits)
    : round_(round), rank_(rank), num_tokens_(round.num_tokens(rank)), keeps_all_bits_(keeps_all_bits) {
  for (int r = 0; r < round.shape.num_ranks; r++) expected_.push_back(Expected::make(round, r));
}

int Trip::owner_of(int token, int k) const {
  const int32_t id = round_.expert(rank_, token, k);
  return id < 0 ? -1 : id / (round_.shape.num_experts / round_.shape.num_ranks);
}

void Trip::fill_inputs() {
  for (int token = 0; token < num_tokens_; token++) {
    for (int i = 0; i < round_.row_words; i++) x_.push_back(round_.word(rank_, token, i));
    for (int i = 0; i < round_.num_scales; i++) scales_.push_back(round_.word(rank_, token, round_.row_words + i));
    for (int k = 0; k < round_.shape.topk; k++) {
      ids_.push_back(round_.expert(rank_, token, k));
      weights_.push_back(round_.weight(rank_, token, k));
    }
  }
}
void Trip::spoil_inputs() {
  x_.assign(x_.size(), 0x5A5A5A5A);
  scales_.assign(scales_.size(), 0x5A5A5A5A);
  ids_.assign(ids_.size(), 0);
  weights_.assign(weights_.size(), 99999.0f);
}

void Trip::check_info() const {
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

void Trip::check_dispatch(const uint32_t* out_x, const uint32_t* out_scales) const {
  check_info();
  std::vector<bool> exists(round_.output.rows(), false);
  for (const Expected::Entry& entry : expected_[rank_].entries) {
    if (entry.row < 0) continue;
    exists[entry.row] = true;
    const auto check = [&](const uint32_t* words, int count, int first, const char* what) {
      for (int i = 0; i < count; i++) {
        const uint32_t expected = keeps_all_bits_ ? round_.word(entry.source, entry.token, first + i)
                                                  : round_.word_on_arrival(entry.source, entry.token, first + i);
        require(words[i] == expected, round_, what, " ", i, " of row ", entry.row, " (rank ", entry.source, ", token ",
                entry.token, ") is ", words[i], ", not ", expected);
      }
    };
    check(out_x + entry.row * round_.row_words, round_.row_words, 0, "word");
    check(out_scales + entry.row * round_.num_scales, round_.num_scales, round_.row_words, "scale");
    check_row_info(entry);
  }
  for (size_t row = 0; row < exists.size(); row++) {
    if (!exists[row]) check_no_row(row);
  }
}

void Trip::check_row_info(const Expected::Entry& entry) const {
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
    require(out_ids_[entry.row * topk + k] == (is_here ? id - rank_ * local_experts : -1), round_, "id ", k, " of row ",
            entry.row, " is ", out_ids_[entry.row * topk + k]);
    require(out_weights_[entry.row * topk + k] == (is_here ? round_.weight(entry.source, entry.token, k) : 0.0f),
            round_, "weight ", k, " of row ", entry.row, " is ", out_weights_[entry.row * topk + k]);
  }
}

void Trip::check_no_row(size_t row) const {
  const bool expert_rows = has_expert_rows(round_.output.layout);
  const int entries = expert_rows ? 1 : round_.shape.topk;
  for (int j = 0; j < entries; j++) {
    require(out_weights_[row * entries + j] == 0.0f, round_, "row ", row, " does not exist and has a weight");
    require(expert_rows || out_ids_[row * entries + j] == -1, round_, "row ", row, " does not exist and has an id");
  }
  require(round_.output.layout != OutputLayout::kPacked || row_expert_[row] == -1, round_, "row ", row,
          " is padding and has an expert");
}

void Trip::fill_rows(float* rows) {
  std::fill(rows, rows + round_.output.rows() * round_.hidden, 99999.0f);
  for (const Expected::Entry& entry : expected_[rank_].entries) {
    for (int i = 0; entry.row >= 0 && i < round_.hidden; i++) {
      rows[entry.row * round_.hidden + i] = round_.value(rank_, entry.source, entry.token, entry.k, i);
    }
  }
  for (int i = 0; i < num_tokens_ * round_.shape.topk; i++) {
    const int token = i / round_.shape.topk, k = i % round_.shape.topk;
    weights_[i] = round_.home_weight(rank_, token, k);
    ids_[i] = round_.home_skips(rank_, token, k) ? -1 : round_.expert(rank_, token, k);
  }
}

float Trip::factor(int token, int k) const {
  switch (round_.weighting) {
    case Weighting::kNone:
      return 1.0f;
    case Weighting::kDispatch:
      return round_.weight(rank_, token, k);
    default:
      return round_.home_skips(rank_, token, k) ? 0.0f : round_.home_weight(rank_, token, k);
  }
}

float Trip::expected_sum(int token, int i) const {
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

void Trip::check_combine() const {
  for (int token = 0; token < num_tokens_; token++) {
    for (int i = 0; i < round_.hidden; i++) {
      const float sum = sums_[static_cast<size_t>(token) * round_.hidden + i], expected = expected_sum(token, i);
      require(same(sum, expected), round_, "element ", i, " of the sum of token ", token, " is ", sum, ", not ",
              expected);
    }
  }
}

std::vector<float> Trip::scalars_to_send() const {
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
  return values;
}

void Trip::check_scalars(const std::vector<float>& scalars) const {
  const int topk = round_.shape.topk;
  for (int i = 0; i < num_tokens_ * topk; i++) {
    const int token = i / topk, k = i % topk, owner = owner_of(token, k);
    const bool is_kept = owner >= 0 && expected_[owner].keeps(rank_, token, k);
    const float expected = is_kept ? round_.value(owner, rank_, token, k, kScalar) : 0.0f;
    require(same(scalars[i], expected), round_, "scalar of token ", token, ", k ", k, " is ", scalars[i], ", not ",
            expected);
  }
}

}  // namespace ep
