// A combine whose weights the home ranks give, split in two: its send does not wait for the weights. It sends
// the rows of a token as they are. The home rank, or for one of another domain the rank that adds up this domain for
// it, weights them, and rounds as the rank of the rows would have done, so that the bits are those of a sum that
// travels.
#pragma once

#include "cuda/ll/combine/rows.cuh"

namespace ep {
inline namespace EP_KERNELS {

// ---- The send

// Where rows of a token of `home` go: where sums of them would (op_context.cuh).
struct UnweightedTarget {
  int rank, source;
  int link;  // that serves the home rank

  __device__ __forceinline__ static UnweightedTarget of(const CombineRole& role, int home) {
    return {target_of(role.peers, home), slot_source(role.peers, home), role.link_of(home)};
  }
  __device__ __forceinline__ char* slot(const CombineRole& role, int bank, int token, int k, bool is_first) const {
    return role.peers.at<char>(rank,
                               role.p.offsets.unweighted_row<kMasksRanks>(bank, source, token, k, is_first, link));
  }
};

// A piece of the rows of a token, and with piece 0 the word that says of which choices there are rows. `batch` holds
// the first rows.
template <DType kIn, int kCount>
__device__ __forceinline__ void send_unweighted(const CombineRole& role, const WarpContext& op, const Unit& unit,
                                                const Terms& terms, RowBatch<kIn, kCount>& batch) {
  const LlCombineParams& p = role.p;
  const int home = role.home_of(unit.home), lane_index = unit.piece * 32 + role.lane;
  const UnweightedTarget target = UnweightedTarget::of(role, home);
  unsigned mask = __ballot_sync(~0u, terms.row >= 0);
  testing_point(Point::kBetweenRows, op, unit.token);
  const bool is_here = reaches(role.peers, home);
  if (kMasksRanks && is_here && __any_sync(~0u, is_masked_now(op, home))) return;
  if (is_here && unit.piece == 0 && role.lane == 0) {
    const Offset word = p.offsets.id_words<kMasksRanks>(op.bank, role.peers.rank, unit.token);
    ptx::st_relaxed_sys(role.peers.at<uint64_t>(home, word), tagged(mask, op.tag));
  }
  bool is_first = true;
#pragma unroll 1
  while (mask != 0) {
    const int count = __popc(mask);
#pragma unroll
    for (int q = 0; q < batch.kRows; q++) {
      if (q >= count) break;
      char* slot = target.slot(role, op.bank, unit.token, __ffs(mask) - 1, is_first);
      batch.rows[q].escape();
      if (lane_index * kCount < p.hidden) batch.rows[q].store_remote(slot, lane_index);
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

// A choice of a token; lane k holds choice k. In the order of ranks, then of k, those with an expert are terms 0, 1,
// ... of the sum.
struct HomeTerm {
  int rank = -1;  // of the row; -1: the choice is no term
  int place = -1;
  bool has_row = false;  // else it was dropped
  uint32_t slot = 0;     // of the row, in units of kLaneBytes behind the slot of source 0
  float weight = 1.0f;
  bool is_skipped = false;  // at home, though the row has come

  // Of an own token. False: a wait was given up. With masks, a rank may be left out.
  __device__ __forceinline__ static bool of(const CombineRole& role, const WarpContext& op, const Choice& choice,
                                            int token, HomeTerm& term) {
    const LlCombineParams& p = role.p;
    const bool is_meant = choice.rank >= 0;
    uint64_t sent = 0;
    uint32_t weight = 0;
    bool has_come = true;
    if (is_meant) {
      // The send has kept it here.
      const Offset kept = p.offsets.weight<kMasksRanks>(op.bank, role.peers.rank, token, role.lane);
      weight = static_cast<uint32_t>(ptx::ld_relaxed_sys(role.peers.local<uint64_t>(kept)));
      const auto* word = role.peers.local<uint64_t>(p.offsets.id_words<kMasksRanks>(op.bank, choice.rank, token));
      sent = ptx::ld_relaxed_sys(word);
      has_come = await_tagged(op, word, Awaited::kPartials, choice.rank, sent);
    }
    __syncwarp();
    const bool is_over = __any_sync(~0u, !has_come && (!kMasksRanks || op.context.has_failed()));
    term.rank = is_meant ? choice.rank : -1;
    if constexpr (kMasksRanks) term.leave_out_ranks_of(!has_come);
    term.arrange(role, op, token, term.rank, role.link_of(role.peers.rank), static_cast<uint32_t>(sent), weight);
    return !is_over;
  }

  // `rank` is known. `source`: whose slots the rows lie in. `sent`: a bit for each choice that has a row.
  __device__ __forceinline__ void arrange(const CombineRole& role, const WarpContext& op, int token, int source,
                                          int link, uint32_t sent, uint32_t weight_bits) {
    const LlOffsets& offsets = role.p.offsets;
    has_row = rank >= 0 && (sent >> role.lane & 1) != 0;
    weight = __uint_as_float(weight_bits);
    is_skipped = weight_bits == kSkippedWeight;
    const unsigned rows = __ballot_sync(~0u, has_row);
    int before = 0;
    bool is_further = false;  // an earlier choice of the same rank has a row
#pragma unroll 1
    for (int k = 0; k < role.p.shape.topk; k++) {
      const int other = __shfl_sync(~0u, rank, k);
      const bool is_earlier = other == rank && k < role.lane;
      if (other >= 0 && (other < rank || is_earlier)) before++;
      is_further = is_further || (is_earlier && (rows >> k & 1) != 0);
    }
    place = rank >= 0 ? before : -1;
    const Offset first = offsets.row<kMasksRanks>(op.bank, 0, token);
    const Offset row =
        offsets.unweighted_row<kMasksRanks>(op.bank, max(source, 0), token, role.lane, !is_further, link);
    slot = static_cast<uint32_t>((row - first) / kLaneBytes);
  }
  // All choices of the ranks that some lane's choice is_late of. Places stay.
  __device__ __forceinline__ void leave_out_ranks_of(bool is_late) {
    __syncwarp();
    const int mine = rank;
#pragma unroll 1
    for (unsigned late = __ballot_sync(~0u, is_late); late != 0; late &= late - 1) {
      if (mine != __shfl_sync(~0u, mine, __ffs(static_cast<int>(late)) - 1)) continue;
      rank = -1;
      has_row = false;
    }
    __syncwarp();
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
  __device__ __forceinline__ char* slot_of(const HomeTerm& term, int lane) const {
    return slots + static_cast<uint64_t>(__shfl_sync(~0u, term.slot, lane)) * kLaneBytes;
  }
  __device__ __forceinline__ bool has_row(const HomeTerm& term, int q) const {
    const unsigned rows = __ballot_sync(~0u, term.has_row);
    return lanes[q] >= 0 && (rows >> lanes[q] & 1) != 0;
  }
  // The first of the batch that has not come, or -1.
  __device__ __forceinline__ int load(const HomeTerm& term) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      numbers[q].fill(0);
      if (has_row(term, q)) numbers[q].load_relaxed_sys(slot_of(term, lanes[q]), 0);
    }
    int absent = -1;
#pragma unroll
    for (int q = kBatch - 1; q >= 0; q--) {
      if (!__all_sync(~0u, numbers[q].have_arrived())) absent = lanes[q];
    }
    return absent;
  }
  // False: the wait was given up. With masks, the terms of ranks that are masked meanwhile are left out.
  __device__ __forceinline__ bool await(const WarpContext& op, HomeTerm& term, const Unit& unit,
                                        LeanWaitBudget& budget) {
    while (true) {
      const int absent = load(term);
      if (absent < 0) return true;
      if (!budget.is_due()) continue;
      const int peer = __shfl_sync(~0u, term.rank, absent);
      if (!__any_sync(~0u, budget.poll(op, Awaited::kPartials, peer, unit.token, unit.piece))) continue;
      if (!kMasksRanks || __any_sync(~0u, op.context.has_failed())) return false;
      term.leave_out_ranks_of(term.rank >= 0 && is_masked_now(op, term.rank));
    }
  }
  // Slots are free again.
  __device__ __forceinline__ void reset(const WarpContext& op, const HomeTerm& term, int q, int token) {
    numbers[q].fill(kAbsent);
    testing_point(Point::kBeforeReset, op, token);
    char* slot = slot_of(term, lanes[q]);
    if (!(has_bug(Bug::kSkippedReset, op.context.kind) && token == 0)) numbers[q].store(slot, 0);
  }
};

// The sum of one rank, rounded as if it had travelled.
template <DType kWire, int kCount>
struct RankSum {
  int rank = -1;
  bool has_term = false;
  float values[kCount];
  Numbers<kWire, kCount> rounded;  // of the last rank that has ended

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
    round_sum(rounded, values, hidden, piece);
    rounded.add_to(total);
  }
};

// Adds up the terms of a piece of a token, rank by rank. False: a wait was given up.
template <DType kIn, DType kWire, int kCount>
__device__ __forceinline__ bool add_terms(const CombineRole& role, const WarpContext& op, HomeTerm& term,
                                          const Unit& unit, int lane_index, RankSum<kWire, kCount>& sum,
                                          float (&total)[kCount]) {
  HomeTerms<kIn, kCount> terms;
  terms.slots = role.peers.local<char>(role.p.offsets.row<kMasksRanks>(op.bank, 0, unit.token)) +
                lane_index * static_cast<int>(sizeof(Numbers<kIn, kCount>));
  LeanWaitBudget budget;
  const int count = __popc(__ballot_sync(~0u, term.place >= 0));
#pragma unroll 1
  for (int first = 0; first < count; first += terms.kBatch) {
    terms.begin_batch(term, first);
    if (!terms.await(op, term, unit, budget)) return false;
    // What was added of a rank that is masked meanwhile is forgotten.
    if (kMasksRanks && sum.rank >= 0 && !__any_sync(~0u, term.rank == sum.rank)) sum.rank = -1;
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
      terms.reset(op, term, q, unit.token);
    }
  }
  sum.end(total, role.p.hidden, unit.piece);
  return true;
}

// Adds up a piece of an own token, what the ranks of the lanes' choices have of it. False: a wait was given up.
template <DType kIn, DType kWire, int kCount>
__device__ __forceinline__ bool add_at_home(const CombineRole& role, const WarpContext& op, const Choice& choice,
                                            const Unit& unit, int lane_index, float (&total)[kCount]) {
  HomeTerm term;
  if (!HomeTerm::of(role, op, choice, unit.token, term)) return false;
  RankSum<kWire, kCount> sum;
  return add_terms<kIn>(role, op, term, unit, lane_index, sum, total);
}

}  // namespace EP_KERNELS
}  // namespace ep
