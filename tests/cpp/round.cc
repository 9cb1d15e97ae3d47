#include "round.h"

#include <bit>

#include "world.h"

namespace ep {

template <class... Parts>
uint64_t Round::draw(Parts... parts) const {
  return hash_of({seed, static_cast<uint64_t>(index), static_cast<uint64_t>(parts)...});
}

Round Round::make(uint64_t seed, int index, int num_ranks, bool same_shape) {
  Round round;
  round.seed = seed;
  round.index = index;
  const auto pick = [&](int what, int choices) {
    return static_cast<int>(hash_of({seed, same_shape ? 0u : static_cast<uint64_t>(index), 1000u + what}) % choices);
  };
  constexpr int kLocalExperts[] = {1, 2, 4, kMaxLocalExperts};
  constexpr DType kTypes[] = {DType::kOpaque32, DType::kF32, DType::kBF16, DType::kOpaque8};
  round.shape = Shape{num_ranks, num_ranks * kLocalExperts[same_shape ? 1 : pick(0, 4)],
                      same_shape ? 2 : 1 + pick(1, kMaxTopk), same_shape ? kMaxTokens : 1 + pick(2, kMaxTokens)};
  round.dtype = kTypes[pick(3, 4)];
  round.row_words = pick(4, 4) == 0 ? kMaxRowWords : 4 * (1 + pick(4, 16));
  round.num_scales = pick(5, 3) == 0 ? kMaxScales : 0;
  round.hidden = 4 * (1 + pick(6, 8));
  round.is_skewed = pick(7, 4) == 0;
  round.sends_scalars = pick(8, 3) == 0;

  OutputShape& output = round.output;
  output = {static_cast<OutputLayout>(pick(9, 4)),
            num_ranks,
            round.shape.local_experts(),
            round.shape.max_tokens,
            round.shape.topk,
            0,
            1 + pick(10, 8)};
  const int most = num_ranks * round.shape.max_tokens * (has_expert_rows(output.layout) ? round.shape.topk : 1);
  output.capacity = output.layout == OutputLayout::kRankMajor ? round.shape.max_tokens
                    : pick(11, 3) == 0                        ? 1 + pick(12, most)
                                                              : most;
  if (has_expert_rows(output.layout)) round.weighting = static_cast<Weighting>(pick(13, 3));
  return round;
}

int Round::num_tokens(int rank) const {
  const uint64_t drawn = draw(1, rank);
  return drawn % 4 == 0 ? shape.max_tokens : static_cast<int>(drawn / 4 % (shape.max_tokens + 1));
}

int32_t Round::expert(int rank, int token, int k) const {
  const uint64_t drawn = draw(2, rank, token, k);
  if (drawn % 8 == 0) return -1;
  if (is_skewed && drawn % 8 < 6) return static_cast<int32_t>(draw(3) % shape.num_experts);
  return static_cast<int32_t>(drawn / 8 % shape.num_experts);
}

bool Round::wants(int rank, int token, int destination) const {
  const int local_experts = shape.num_experts / shape.num_ranks;
  for (int k = 0; k < shape.topk; k++) {
    const int32_t id = expert(rank, token, k);
    if (id >= 0 && id / local_experts == destination) return true;
  }
  return false;
}

float Round::weight(int rank, int token, int k) const {
  constexpr float kWeights[] = {0.25f, 0.5f, 1.0f, 2.0f, -1.0f};
  return kWeights[draw(4, rank, token, k) % 5];
}

uint32_t Round::word(int rank, int token, int i) const {
  constexpr uint32_t kAwkward[] = {kAbsent, kAbsent - 1, 0};
  const uint64_t drawn = draw(5, rank, token, i);
  if (draw(6, rank, token) % 8 == 0) return kAbsent;  // a whole row
  return drawn % 4 == 0 ? kAwkward[drawn / 4 % 3] : static_cast<uint32_t>(drawn >> 32);
}

// Of floats that travel without scales, the NaN of all ones becomes its neighbour.
uint32_t Round::word_on_arrival(int rank, int token, int i) const {
  const uint32_t sent = word(rank, token, i);
  const bool keeps_bits = num_scales > 0 || dtype == DType::kOpaque32 || dtype == DType::kOpaque8;
  return sent == 0xFFFFFFFFu && !keeps_bits ? 0xFFFFFFFEu : sent;
}

// Small integers, of which every sum is exact in any order, and here and there the NaN of all ones.
float Round::value(int owner, int rank, int token, int k, int i) const {
  const uint64_t drawn = draw(7, owner, rank, token, k + 1, i);
  if (drawn % 16 == 0) return std::bit_cast<float>(0xFFFFFFFFu);
  return static_cast<float>(static_cast<int>(drawn / 16 % 1024) - 512);
}

bool Round::home_skips(int rank, int token, int k) const { return draw(8, rank, token, k) % 8 == 0; }

Expected Expected::make(const Round& round, int rank) {
  const OutputShape& output = round.output;
  const int num_ranks = round.shape.num_ranks, topk = round.shape.topk;
  const int local_experts = round.shape.num_experts / num_ranks;
  const bool expert_rows = output.layout == OutputLayout::kExpertMajor || output.layout == OutputLayout::kPacked;
  const int bins = expert_rows ? local_experts : num_ranks;
  Expected expected;
  int64_t start = 0;
  // Bin by bin, each over all tokens of the world: slow, but nothing is counted in advance.
  for (int bin = 0; bin < bins; bin++) {
    int64_t index = 0, kept = 0;
    expected.starts.push_back(start);
    for (int source = 0; source < num_ranks; source++) {
      for (int token = 0; token < round.num_tokens(source); token++) {
        for (int k = 0; k < (expert_rows ? topk : 1); k++) {
          const bool is_in = expert_rows ? round.expert(source, token, k) == rank * local_experts + bin
                                         : source == bin && round.wants(source, token, rank);
          if (!is_in) continue;
          int64_t row = -1;
          switch (output.layout) {
            case OutputLayout::kExpertMajor:
              row = index < output.capacity ? bin * output.capacity + index : -1;
              break;
            case OutputLayout::kRankMajor:
              row = bin * round.shape.max_tokens + index;
              break;
            default:
              row = start + index < output.capacity ? start + index : -1;
          }
          expected.entries.push_back({source, token, expert_rows ? k : -1, bin, row});
          kept += row >= 0;
          index++;
        }
      }
    }
    expected.demand.push_back(index);
    expected.counts.push_back(kept);
    expected.dropped += index - kept;
    start += index;
    while (output.layout == OutputLayout::kPacked && start % output.alignment != 0) start++;
  }
  expected.starts.push_back(start);
  return expected;
}

bool Expected::keeps(int source, int token, int k) const {
  for (const Entry& entry : entries) {
    if (entry.source == source && entry.token == token && (entry.k == k || entry.k == -1)) return entry.row >= 0;
  }
  return false;
}

}  // namespace ep
