// One round of the stress: sizes, routing and contents follow from a seed, so that every rank knows what every other
// sends, and what must come out, without a word of the library's own arithmetic.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/ll/params.h"

namespace ep {

struct Round {
  uint64_t seed = 0;
  int index = 0;
  Shape shape;
  OutputShape output;
  DType dtype = DType::kOpaque32;
  int row_words = 4;  // of 32 bits
  int num_scales = 0;
  int hidden = 4;  // of the combined rows, fp32
  Weighting weighting = Weighting::kNone;
  bool is_skewed = false;  // most choices name one expert
  bool sends_scalars = false;

  static constexpr int kMaxTokens = 6, kMaxTopk = 5, kMaxLocalExperts = 300, kMaxRowWords = 160, kMaxScales = 3;
  static Round make(uint64_t seed, int index, int num_ranks, bool same_shape);

  int num_tokens(int rank) const;
  int32_t expert(int rank, int token, int k) const;  // -1: no choice
  bool wants(int rank, int token, int destination) const;
  float weight(int rank, int token, int k) const;
  uint32_t word(int rank, int token, int i) const;  // of x, then of its scales
  uint32_t word_on_arrival(int rank, int token, int i) const;
  // Element of the row that `owner` hands to combine for (rank, token, k); rank layouts have one row, k = -1.
  float value(int owner, int rank, int token, int k, int i) const;
  float home_weight(int rank, int token, int k) const { return 2 * weight(rank, token, k); }
  bool home_skips(int rank, int token, int k) const;

  int elements() const { return row_words * 4 / size_of(dtype); }

 private:
  template <class... Parts>
  uint64_t draw(Parts... parts) const;
};

// What must lie in the output of a rank after dispatch.
struct Expected {
  struct Entry {
    int source, token, k;  // k: -1 in rank layouts
    int bin;
    int64_t row;  // -1: dropped
  };
  std::vector<Entry> entries;
  std::vector<int64_t> counts, demand, starts;
  int64_t dropped = 0;

  static Expected make(const Round& round, int rank);
  // Whether this rank keeps the row of (source, token, k); k is not looked at in rank layouts.
  bool keeps(int source, int token, int k) const;
};

}  // namespace ep
