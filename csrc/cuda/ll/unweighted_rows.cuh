// A combine whose weights the home ranks give, split in two: its sending half does not wait for the weights. It sends
// the rows of a token as they are. The home rank weights them, and rounds as the rank of the rows would have done, so
// that the bits are those of a sum that travels.
#pragma once

#include "cuda/ll/combine_rows.cuh"

namespace ep {
inline namespace EP_KERNELS {

// ---- The sending half

// A piece of the rows of a token, and with piece 0 the word that says of which choices there are rows. `batch` holds
// the first rows.
template <DType kIn, int kCount>
__device__ __forceinline__ void send_unweighted(const CombineRole& role, const WarpContext& op, const Unit& unit,
                                                const Terms& terms, RowBatch<kIn, kCount>& batch) {
  const LlCombineParams& p = role.p;
  const int home = role.home_of(unit.home), lane_index = unit.piece * 32 + role.lane;
  unsigned mask = __ballot_sync(~0u, terms.row >= 0);
  testing_point(Point::kBetweenRows, op, unit.token);
  if (unit.piece == 0 && role.lane == 0) {
    const Offset word = p.offsets.id_words<false>(op.bank, role.peers.rank, unit.token);
    ptx::st_relaxed_sys(role.peers.at<uint64_t>(home, word), tagged(mask, op.tag));
  }
  bool is_first = true;
#pragma unroll 1
  while (mask != 0) {
    const int count = __popc(mask);
#pragma unroll
    for (int q = 0; q < batch.kRows; q++) {
      if (q >= count) break;
      const Offset slot = p.offsets.unweighted_row(op.bank, role.peers.rank, unit.token, __ffs(mask) - 1, is_first);
      batch.rows[q].escape();
      if (lane_index * kCount < p.hidden) batch.rows[q].store_remote(role.peers.at<char>(home, slot), lane_index);
      mask &= mask - 1;
      is_first = false;
    }
    if (mask != 0) batch.load(role, terms, mask, lane_of_rows<kIn, kCount>(role, unit.piece));
  }
}

// ---- At home

// Waits for a tagged word, of which `word` was seen. False: the wait was given up. Inline, as in Sender::weigh().
__device__ __forceinline__ bool await_tagged(const WarpContext& op, const uint64_t* address, Awaited awaited, int peer,
                                             uint64_t& word) {
  WaitBudget budget;
  while (!is_tagged(word, op.tag)) {
    if (budget.is_spent(op, awaited, peer, op.tag, word >> 32)) return false;
    word = ptx::ld_relaxed_sys(address);
  }
  return true;
}

// The ranks that send their rows unweighted, as a receiver learns from their op headers with its first piece.
struct UnweightedRanks {
  static constexpr bool kAreThere = !kMasksRanks && !kCrossesDomains;  // else such a half sends sums
  uint64_t ranks = 0;
  bool are_known = !kAreThere;
  uint64_t seen[2] = {0, 0};  // of ranks `lane` and `lane` + 32

  __device__ __forceinline__ static const uint64_t* flags_of(const CombineRole& role, const WarpContext& op, int rank) {
    return role.peers.local<uint64_t>(role.p.offsets.header(op.bank, rank)) + OpHeader::kFlags;
  }
  __device__ __forceinline__ void prefetch(const CombineRole& role, const WarpContext& op) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int rank = role.lane + 32 * i;
      if (rank < role.p.shape.num_ranks) seen[i] = ptx::ld_relaxed_sys(flags_of(role, op, rank));
    }
  }
  // False: a wait was given up.
  __device__ __forceinline__ bool learn(const CombineRole& role, const WarpContext& op) {
    bool is_ok = true;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int rank = role.lane + 32 * i;
      if (rank < role.p.shape.num_ranks) {
        is_ok = await_tagged(op, flags_of(role, op, rank), Awaited::kOpHeader, rank, seen[i]) && is_ok;
      }
      __syncwarp();
      const bool is_one = (static_cast<uint32_t>(seen[i]) & OpHeader::kUnweightedFlag) != 0;
      ranks |= static_cast<uint64_t>(__ballot_sync(~0u, is_one)) << (32 * i);
    }
    are_known = true;
    return __all_sync(~0u, is_ok);
  }
};

// What a choice of an own token adds to the sum; lane k holds choice k. In the order of ranks, then of k, they are
// terms 0, 1, ...
struct HomeTerm {
  enum Form : int { kNothing, kRow, kSum, kOwnSum };  // kNothing: dropped, or a part of another one's sum
  Form form = kNothing;
  int rank = -1;
  int place = -1;
  int slot = 0;  // the source of it, or the number of a further row behind them (LlOffsets::unweighted_row)
  float weight = 1.0f;
  bool is_skipped = false;  // at home, though the row has come

  __device__ __forceinline__ bool travels() const { return form == kRow || form == kSum; }

  // False: a wait was given up.
  __device__ __forceinline__ static bool of(const CombineRole& role, const WarpContext& op, const Choice& choice,
                                            uint64_t unweighted_ranks, int token, HomeTerm& term) {
    const LlCombineParams& p = role.p;
    term.rank = choice.rank;
    const bool is_own = sends(p.phase) && term.rank == role.peers.rank;
    const bool is_unweighted = term.rank >= 0 && !is_own && (unweighted_ranks >> term.rank & 1) != 0;
    uint64_t sent = 0;
    uint32_t weight = 0;
    bool is_ok = true;
    if (is_unweighted) {
      weight = weight_of_choice(role, op, token);
      const auto* word = role.peers.local<uint64_t>(p.offsets.id_words<false>(op.bank, term.rank, token));
      sent = ptx::ld_relaxed_sys(word);
      is_ok = await_tagged(op, word, Awaited::kPartials, term.rank, sent);
    }
    __syncwarp();
    const bool is_row = is_unweighted && (static_cast<uint32_t>(sent) >> role.lane & 1) != 0;
    const unsigned rows = __ballot_sync(~0u, is_row);
    unsigned same = 0;  // earlier choices of the same rank
#pragma unroll 1
    for (int k = 0; k < p.shape.topk; k++) {
      const int other = __shfl_sync(~0u, term.rank, k);
      if (other == term.rank && k < role.lane) same |= 1u << k;
    }
    const bool is_first = same == 0;
    const bool is_term = term.rank >= 0 && (is_unweighted || is_first);
    if (is_row) {
      term.form = kRow;
      term.weight = __uint_as_float(weight);
    } else if (is_term && !is_unweighted) {
      term.form = is_own ? kOwnSum : kSum;
    }
    term.slot = is_row && (rows & same) != 0 ? p.shape.num_ranks + role.lane - 1 : term.rank;
    const unsigned terms = __ballot_sync(~0u, is_term);
    int place = 0;
#pragma unroll 1
    for (int k = 0; k < p.shape.topk; k++) {
      const int other = __shfl_sync(~0u, term.rank, k);
      const bool is_before = other < term.rank || (other == term.rank && k < role.lane);
      if ((terms >> k & 1) != 0 && is_before) place++;
    }
    term.place = is_term ? place : -1;
    term.is_skipped = weight == kSkippedWeight;
    return __all_sync(~0u, is_ok);
  }

 private:
  // The sending half has kept it in the own window, for the receiving half.
  __device__ __forceinline__ static uint32_t weight_of_choice(const CombineRole& role, const WarpContext& op,
                                                              int token) {
    const LlCombineParams& p = role.p;
    if (sends(p.phase)) {
      OwnHomeWeight own;
      own.load(p, token * p.shape.topk + role.lane);
      return own.bits(p);
    }
    const Offset word = p.offsets.weight<false>(op.bank, role.peers.rank, token, role.lane);
    return static_cast<uint32_t>(ptx::ld_relaxed_sys(role.peers.local<uint64_t>(word)));
  }
};

// Up to four terms of a piece at a time. Lanes past the row's end do what the last lane inside does.
template <DType kWire, int kCount>
struct HomeTerms {
  static constexpr int kBatch = 4;
  int lanes[kBatch];  // that hold the batch's terms; -1: none
  char* slots;        // of source 0's row, this lane's numbers
  Numbers<kWire, kCount> numbers[kBatch];

  __device__ __forceinline__ void begin_batch(const HomeTerm& term, int first) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) lanes[q] = __ffs(__ballot_sync(~0u, term.place == first + q)) - 1;
  }
  __device__ __forceinline__ char* slot_of(const CombineRole& role, const HomeTerm& term, int lane) const {
    return slots + static_cast<uint64_t>(__shfl_sync(~0u, term.slot, lane)) * role.geometry.source_bytes;
  }
  __device__ __forceinline__ bool travels(const HomeTerm& term, int q) const {
    const unsigned travelling = __ballot_sync(~0u, term.travels());
    return lanes[q] >= 0 && (travelling >> lanes[q] & 1) != 0;
  }
  // The first of the batch that has not come, or -1.
  __device__ __forceinline__ int load(const CombineRole& role, const HomeTerm& term) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      numbers[q].fill(0);
      if (travels(term, q)) numbers[q].load_relaxed_sys(slot_of(role, term, lanes[q]), 0);
    }
    int absent = -1;
#pragma unroll
    for (int q = kBatch - 1; q >= 0; q--) {
      if (!__all_sync(~0u, numbers[q].have_arrived())) absent = lanes[q];
    }
    return absent;
  }
  // False: the wait was given up.
  __device__ __forceinline__ bool await(const CombineRole& role, const WarpContext& op, const HomeTerm& term,
                                        const Unit& unit, LeanWaitBudget& budget) {
    while (true) {
      const int absent = load(role, term);
      if (absent < 0) return true;
      if (!budget.is_due()) continue;
      const int peer = __shfl_sync(~0u, term.rank, absent);
      if (__any_sync(~0u, budget.poll(op, Awaited::kPartials, peer, unit.token, unit.piece))) return false;
    }
  }
  // Slots are free again.
  __device__ __forceinline__ void reset(const CombineRole& role, const WarpContext& op, const HomeTerm& term, int q,
                                        int token) {
    numbers[q].fill(kAbsent);
    testing_point(Point::kBeforeReset, op, token);
    char* slot = slot_of(role, term, lanes[q]);
    if (!(has_bug(Bug::kSkippedReset, op.context.kind) && token == 0)) numbers[q].store(slot, 0);
  }
};

// The sum of one rank, rounded as if it had travelled.
template <DType kWire, int kCount>
struct RankSum {
  int rank = -1;
  bool has_term = false;
  float values[kCount];

  __device__ __forceinline__ void begin(int of_rank) {
    rank = of_rank;
    has_term = false;
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = kNothingYet;
  }
  __device__ __forceinline__ void end(float (&total)[kCount]) {
    if (rank < 0) return;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (!has_term) values[i] = 0.0f;
    }
    Numbers<kWire, kCount> sum;
    sum.from(values);
    sum.add_to(total);
  }
};

template <int kCount>
struct Total {
  float values[kCount];
  bool is_ok;  // else a wait was given up
};

// Adds up a piece of a token of which some ranks sent their rows; `total`: what the sum begins with. All by value: what
// has an address lies in memory, and for the pieces whose sums travel, too.
template <DType kWire, int kCount>
__device__ __noinline__ Total<kCount> add_at_home(const CombineRole role, const WarpContext op,
                                                  const uint64_t unweighted_ranks, const Unit unit,
                                                  const int lane_index, const Choice choice,
                                                  const Numbers<kWire, kCount> own, Total<kCount> total) {
  total.is_ok = false;
  HomeTerm term;
  if (!HomeTerm::of(role, op, choice, unweighted_ranks, unit.token, term)) return total;
  HomeTerms<kWire, kCount> terms;
  terms.slots = role.peers.local<char>(role.p.offsets.row<false>(op.bank, 0, unit.token)) +
                lane_index * static_cast<int>(sizeof(Numbers<kWire, kCount>));
  RankSum<kWire, kCount> sum;
  LeanWaitBudget budget;
  const int count = __popc(__ballot_sync(~0u, term.place >= 0));
#pragma unroll 1
  for (int first = 0; first < count; first += terms.kBatch) {
    terms.begin_batch(term, first);
    if (!terms.await(role, op, term, unit, budget)) return total;
#pragma unroll
    for (int q = 0; q < terms.kBatch; q++) {
      const int lane = terms.lanes[q];
      if (lane < 0) break;
      const int rank = __shfl_sync(~0u, term.rank, lane), form = __shfl_sync(~0u, static_cast<int>(term.form), lane);
      const float weight = __shfl_sync(~0u, term.weight, lane);
      const bool is_skipped = __shfl_sync(~0u, term.is_skipped ? 1 : 0, lane) != 0;
      if (rank != sum.rank) {
        sum.end(total.values);
        sum.begin(rank);
      }
      if (form == HomeTerm::kNothing) continue;
      sum.has_term = sum.has_term || form != HomeTerm::kRow || !is_skipped;
      if (form == HomeTerm::kOwnSum) {
        own.add_to(sum.values);
      } else if (form == HomeTerm::kSum) {
        terms.numbers[q].add_to(sum.values);
      } else if (!is_skipped) {
        terms.numbers[q].add_product_to(sum.values, weight);
      }
      if (form != HomeTerm::kOwnSum) terms.reset(role, op, term, q, unit.token);
    }
  }
  sum.end(total.values);
  total.is_ok = true;
  return total;
}

}  // namespace EP_KERNELS
}  // namespace ep
