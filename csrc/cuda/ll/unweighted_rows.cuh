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

// A choice of an own token; lane k holds choice k. In the order of ranks, then of k, those with an expert are
// terms 0, 1, ... of the sum.
struct HomeTerm {
  int rank = -1;
  int place = -1;
  bool has_row = false;  // else it was dropped
  int slot = 0;  // the source of the row, or the number of a further row behind them (LlOffsets::unweighted_row)
  float weight = 1.0f;
  bool is_skipped = false;  // at home, though the row has come

  // False: a wait was given up.
  __device__ __forceinline__ static bool of(const CombineRole& role, const WarpContext& op, const Choice& choice,
                                            int token, HomeTerm& term) {
    const LlCombineParams& p = role.p;
    term.rank = choice.rank;
    uint64_t sent = 0;
    uint32_t weight = 0;
    bool is_ok = true;
    if (term.rank >= 0) {
      // The sending half has kept it here.
      const Offset kept = p.offsets.weight<false>(op.bank, role.peers.rank, token, role.lane);
      weight = static_cast<uint32_t>(ptx::ld_relaxed_sys(role.peers.local<uint64_t>(kept)));
      const auto* word = role.peers.local<uint64_t>(p.offsets.id_words<false>(op.bank, term.rank, token));
      sent = ptx::ld_relaxed_sys(word);
      is_ok = await_tagged(op, word, Awaited::kPartials, term.rank, sent);
    }
    __syncwarp();
    term.has_row = term.rank >= 0 && (static_cast<uint32_t>(sent) >> role.lane & 1) != 0;
    term.weight = __uint_as_float(weight);
    term.is_skipped = weight == kSkippedWeight;
    const unsigned rows = __ballot_sync(~0u, term.has_row);
    int place = 0;
    bool is_further = false;  // an earlier choice of the same rank has a row
#pragma unroll 1
    for (int k = 0; k < p.shape.topk; k++) {
      const int other = __shfl_sync(~0u, term.rank, k);
      const bool is_earlier = other == term.rank && k < role.lane;
      if (other >= 0 && (other < term.rank || is_earlier)) place++;
      is_further = is_further || (is_earlier && (rows >> k & 1) != 0);
    }
    term.place = term.rank >= 0 ? place : -1;
    term.slot = is_further ? p.shape.num_ranks + role.lane - 1 : term.rank;
    return __all_sync(~0u, is_ok);
  }
};

// Up to four terms of a piece at a time. Lanes past the row's end do what the last lane inside does.
template <DType kIn, int kCount>
struct HomeTerms {
  static constexpr int kBatch = 4;
  int lanes[kBatch];  // that hold the batch's terms; -1: none
  char* slots;        // of source 0's row, this lane's numbers
  Numbers<kIn, kCount> numbers[kBatch];

  __device__ __forceinline__ void begin_batch(const HomeTerm& term, int first) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) lanes[q] = __ffs(__ballot_sync(~0u, term.place == first + q)) - 1;
  }
  __device__ __forceinline__ char* slot_of(const CombineRole& role, const HomeTerm& term, int lane) const {
    return slots + static_cast<uint64_t>(__shfl_sync(~0u, term.slot, lane)) * role.geometry.source_bytes;
  }
  __device__ __forceinline__ bool has_row(const HomeTerm& term, int q) const {
    const unsigned rows = __ballot_sync(~0u, term.has_row);
    return lanes[q] >= 0 && (rows >> lanes[q] & 1) != 0;
  }
  // The first of the batch that has not come, or -1.
  __device__ __forceinline__ int load(const CombineRole& role, const HomeTerm& term) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      numbers[q].fill(0);
      if (has_row(term, q)) numbers[q].load_relaxed_sys(slot_of(role, term, lanes[q]), 0);
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
  __device__ __forceinline__ void end(float (&total)[kCount], int hidden, int piece) {
    if (rank < 0) return;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (!has_term) values[i] = 0.0f;
    }
    Numbers<kWire, kCount> sum;
    round_sum(sum, values, hidden, piece);
    sum.add_to(total);
  }
};

// Adds up a piece of a token. False: a wait was given up.
template <DType kIn, DType kWire, int kCount>
__device__ __forceinline__ bool add_at_home(const CombineRole& role, const WarpContext& op, const Choice& choice,
                                            const Unit& unit, int lane_index, float (&total)[kCount]) {
  HomeTerm term;
  if (!HomeTerm::of(role, op, choice, unit.token, term)) return false;
  HomeTerms<kIn, kCount> terms;
  terms.slots = role.peers.local<char>(role.p.offsets.row<false>(op.bank, 0, unit.token)) +
                lane_index * static_cast<int>(sizeof(Numbers<kIn, kCount>));
  RankSum<kWire, kCount> sum;
  LeanWaitBudget budget;
  const int count = __popc(__ballot_sync(~0u, term.place >= 0));
#pragma unroll 1
  for (int first = 0; first < count; first += terms.kBatch) {
    terms.begin_batch(term, first);
    if (!terms.await(role, op, term, unit, budget)) return false;
#pragma unroll
    for (int q = 0; q < terms.kBatch; q++) {
      const int lane = terms.lanes[q];
      if (lane < 0) break;
      const int rank = __shfl_sync(~0u, term.rank, lane);
      const float weight = __shfl_sync(~0u, term.weight, lane);
      const bool is_skipped = __shfl_sync(~0u, term.is_skipped ? 1 : 0, lane) != 0;
      if (rank != sum.rank) {
        sum.end(total, role.p.hidden, unit.piece);
        sum.begin(rank);
      }
      if (!terms.has_row(term, q)) continue;
      if (!is_skipped) {
        terms.numbers[q].add_product_to(sum.values, weight);
        sum.has_term = true;
      }
      terms.reset(role, op, term, q, unit.token);
    }
  }
  sum.end(total, role.p.hidden, unit.piece);
  return true;
}

}  // namespace EP_KERNELS
}  // namespace ep
