// What low-latency combine receives: the ranks' partial sums of own tokens, which it adds up.
#pragma once

#include "cuda/device/home_sum.cuh"
#include "cuda/ll/combine/home_weights.cuh"
#include "cuda/ll/combine/unweighted_rows.cuh"

namespace ep {
inline namespace EP_KERNELS {

// The handle's entries of an own token: choice `lane`, and the terms of this rank's share.
struct OwnEntriesAt {
  const int* id = nullptr;  // null: no such choice
  TermsAt terms;

  __device__ __forceinline__ static OwnEntriesAt of(const CombineRole& role, int token) {
    OwnEntriesAt at;
    if (role.lane < role.p.shape.topk) at.id = role.p.handle.ids + token * role.p.shape.topk + role.lane;
    at.terms = TermsAt::of(role, role.peers.rank, token);
    if (!sends(role.p.phase)) at.terms.row = nullptr;
    return at;
  }
};

// A batch of ranks, in bytes that end with 0xFF and count from rank `first`, without those that are masked now.
static __device__ __noinline__ uint32_t without_masked(const OpContext& context, uint32_t ranks, int first) {
  uint32_t left = ~0u;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    const uint32_t rank = ranks >> shift & 0xFF;
    const bool stays = rank != 0xFF && ptx::ld_relaxed_gpu(&context.state->masks.is_masked[first + rank]) == 0;
    if (__any_sync(~0u, rank != 0xFF && !stays)) continue;
    left = left << 8 | rank;
  }
  return left;
}

// A choice, if its rank was not masked when the operation began; else none.
__device__ __forceinline__ Choice not_masked(const OpContext& context, Choice choice) {
  if (kMasksRanks && choice.rank >= 0 && is_masked(context, choice.rank)) choice.rank = -1;
  return choice;
}

// The ranks' sums of a piece, as they arrive in the own window: up to four ranks at a time, in ascending order. Lanes
// past the row's end do what the last lane inside does. `Ranks`: how the ranks are known.
template <DType kWire, int kCount, class Ranks = LaneRanks>
struct Partials {
  static constexpr int kBatch = 4;
  static constexpr uint32_t kNone = 0xFF;
  static constexpr uint32_t kNoLocalRank = INT32_MAX;
  Ranks sources;        // that are not taken yet
  uint32_t local_rank;  // whose share does not travel, less sources.first()
  uint32_t ranks;       // of the batch, less sources.first(), in bytes: registers are few
  char* slots;          // of the row of rank sources.first(), this lane's numbers
  PlaceOf<kWire> place;
  Numbers<kWire, kCount> numbers[kBatch];

  __device__ __forceinline__ Partials(const CombineRole& role, const WarpContext& op, const Ranks& all,
                                      const Unit& unit, int lane_index)
      : sources(all),
        local_rank((sends(role.p.phase) ? role.peers.rank : kNoLocalRank) - all.first()),
        slots(ptx::opaque(role.peers.local<char>(role.p.offsets.row<kMasksRanks>(op.bank, 0, unit.token)) +
                          lane_index * Numbers<kWire, kCount>::kLaneBytes)),
        place(place_of<kWire>(role.p.hidden, lane_index)) {
    if (all.first() > 0) slots = slot_of(role, all.first());
  }

  __device__ __forceinline__ bool has_more(const CombineRole& role) const {
    return sources.has_more(role.p.shape.num_ranks);
  }
  __device__ __forceinline__ void begin_batch(const CombineRole& role) {
    if (sources.word == 0) {
      const int before = sources.first();
      sources.find();
      slots = slot_of(role, sources.first() - before);
      local_rank -= sources.first() - before;
    }
    ranks = ~0u;
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      if (sources.word == 0) break;
      ranks ^= ((__ffs(static_cast<int>(sources.word)) - 1) ^ kNone) << (8 * q);
      sources.word &= sources.word - 1;
    }
  }
  __device__ __forceinline__ uint32_t rank_of(int q) const { return ranks >> (8 * q) & kNone; }
  __device__ __forceinline__ bool travels(uint32_t rank) const { return rank != kNone && rank != local_rank; }
  __device__ __forceinline__ char* slot_of(const CombineRole& role, uint32_t rank) const {
    return slots + static_cast<uint64_t>(rank) * role.geometry.source_bytes;
  }

  // Waits for the batch, but for ranks that are masked meanwhile. False: the wait was given up.
  __device__ __forceinline__ bool await(const CombineRole& role, const WarpContext& op, const Unit& unit,
                                        LeanWaitBudget& budget) {
    while (true) {
      ranks = ptx::opaque(ranks);  // addresses are worked out again
      if (have_arrived(role, op)) return true;
      if (!is_spent(role, op, unit, budget)) continue;
      if (!kMasksRanks || __any_sync(~0u, op.context.has_failed())) return false;
      ranks = without_masked(op, ranks, sources.first());
    }
  }
  __device__ __forceinline__ bool have_arrived(const CombineRole& role, const WarpContext& op) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      numbers[q].fill(0);
      const uint32_t r = rank_of(q);
      if (travels(r)) numbers[q].load_relaxed_sys(slot_of(role, r), place);
    }
    bool ok = true;
#pragma unroll
    for (int q = 0; q < kBatch; q++) ok = ok && numbers[q].have_arrived();
    if (has_bug(Bug::kTornRows, op.context.kind)) ok = numbers[0].have_arrived();
    return __all_sync(~0u, ok);
  }
  __device__ __forceinline__ uint32_t rank_of_lane(const CombineRole& role) const {
    return role.lane < kBatch ? ranks >> (8 * role.lane) & kNone : kNone;
  }
  // Bit q: the q-th of the batch is not there. If a rank may be masked for it, all of its words count; else one word is
  // enough.
  __device__ __forceinline__ unsigned absent(const CombineRole& role) const {
    if (kMasksRanks) {
      unsigned missing = 0;
#pragma unroll
      for (int q = 0; q < kBatch; q++) missing |= __any_sync(~0u, !numbers[q].have_arrived()) ? 1u << q : 0;
      return missing;
    }
    const uint32_t r = rank_of_lane(role);
    const auto* word = reinterpret_cast<const uint32_t*>(slot_of(role, r));
    return __ballot_sync(~0u, travels(r) && ptx::ld_relaxed_sys(word) == kAbsent);
  }
  __device__ __forceinline__ bool is_spent(const CombineRole& role, const WarpContext& op, const Unit& unit,
                                           LeanWaitBudget& budget) const {
    if (!budget.is_due()) return false;
    unsigned waited_for = absent(role);
    if (waited_for == 0) waited_for = __ballot_sync(~0u, travels(rank_of_lane(role)));  // part of each has come
    const int source = sources.first() + static_cast<int>(rank_of(__ffs(static_cast<int>(waited_for)) - 1));
    const int peer = target_of(role.peers, source);  // a slot of another domain's source is a rank's of the own lane
    return __any_sync(~0u, budget.poll(op, Awaited::kPartials, peer, unit.token, unit.piece));
  }

  // In the order of ranks. Slots are free again.
  __device__ __forceinline__ void add_to(const CombineRole& role, const WarpContext& op, int token,
                                         const Numbers<kWire, kCount>& own, float (&total)[kCount]) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      const uint32_t r = rank_of(q);
      if (r == kNone) break;
      if (r == local_rank) numbers[q] = own;
      numbers[q].add_to(total);
      if (r == local_rank) continue;
      numbers[q].fill(kAbsent);
      testing_point(Point::kBeforeReset, op, token);
      if (!(has_bug(Bug::kSkippedReset, op.context.kind) && token == 0)) numbers[q].store(slot_of(role, r), place);
    }
  }
};

// The same over several domains (links/combine.cuh).
template <DType kIn, bool kUnweighted, DType kWire, int kCount>
__device__ bool add_domains(const CombineRole& role, const WarpContext& op, const Choice& choice, const Unit& unit,
                            int lane_index, const Numbers<kWire, kCount>& own, float (&total)[kCount]);

// Adds up piece `number`. `id`: of choice `lane`. False: a wait was given up.
template <DType kIn, DType kWire, DType kOut, bool kUnweighted, int kCount>
__device__ __forceinline__ bool sum_piece(const CombineRole& role, const WarpContext& op, int number, int id,
                                          const Numbers<kWire, kCount>& own) {
  const LlCombineParams& p = role.p;
  const Unit unit = role.geometry.schedule.unit(0, number);
  const int lane_index = min(unit.piece * 32 + role.lane, p.hidden / kCount - 1);
  const Choice choice = not_masked(op, Choice::of(id, p.shape.num_experts, role.geometry.by_local_experts));
  const LaneRanks sources = LaneRanks::of(choice.rank);
  stamp(Stamp::kOwnDone, role.peers.rank);
  Partials<kWire, kCount> partials(role, op, sources, unit, lane_index);
  const bool has_terms = partials.has_more(role);
  const HomePlace place{static_cast<int64_t>(unit.token) * p.hidden * size_of(kOut), lane_index, 1};
  float home[1][kCount];
  float(&total)[kCount] = home[0];
  begin_home_sum<kOut>(
      p, [&] { return place; }, has_terms || begins_with_bias(p) ? kNothingYet : 0.0f, home);
  if constexpr (kCrossesDomains) {
    if (!add_domains<kIn, kUnweighted>(role, op, choice, unit, lane_index, own, total)) return false;
  } else if constexpr (kUnweighted) {
    if (!add_at_home<kIn, kWire>(role, op, choice, unit, lane_index, total)) return false;
  } else {
    LeanWaitBudget budget;
#pragma unroll 1
    while (partials.has_more(role)) {
      partials.begin_batch(role);
      if (!partials.await(role, op, unit, budget)) return false;
      partials.add_to(role, op, unit.token, own, total);
    }
  }
  store_home_sum<kOut>(p, place, home);
  return true;
}

// A receiver loads its own rows of a piece while it waits for the others' rows of the piece before: late loads come
// late, as the loads of an SM queue up behind its remote stores. Pieces are known by their numbers (WorkSchedule).
template <DType kIn, DType kWire, DType kOut, int kCount, bool kHome, bool kUnweighted>
struct Receiver {
  int number = 0;             // of the piece whose entries of the handle are being loaded
  int id = -1;                // of choice `lane`
  Terms terms{kNoRow, 1.0f};  // of the own share
  OwnEntriesAt first_at;
  int rows_number = 0;  // of the piece whose own rows are being loaded
  int rows_id = -1;
  Terms rows_terms;
  OwnHomeWeight rows_weight;
  RowBatch<kIn, kCount> rows;
  Numbers<kWire, kCount> own;  // share of the piece that is added up, or of the next one

  __device__ __forceinline__ void locate_first(const CombineRole& role) {
    number = role.receiver();
    if (has_next(role)) first_at = OwnEntriesAt::of(role, role.geometry.schedule.unit(0, number).token);
  }
  __device__ __forceinline__ void prefetch_first(const CombineRole& role) {
    if (has_next(role)) prefetch(role, first_at);
  }
  // begin() is that of a sender. The first share needs nothing of this operation, and is ready by then where SMs have
  // little to send.
  template <class Begin>
  __device__ __forceinline__ void sum_all(const CombineRole& role, const WarpContext& op, const Begin& begin) {
    bool has_begun = false;
    if (role.geometry.is_busy || !has_next(role)) {
      if (!begin() || !has_next(role)) return;
      has_begun = true;
    }
    load_rows(role);
    if constexpr (kIsAhead) add_up_own(role);
#pragma unroll 1
    while (true) {
      if constexpr (!kIsAhead) add_up_own(role);
      if (!has_begun && !begin()) return;
      has_begun = true;
      const int now = rows_number, now_id = rows_id;
      const Numbers<kWire, kCount> own_now = own;
      const bool is_last = !has_next(role);
      if (!is_last) {
        load_rows(role);
        if constexpr (kIsAhead) add_up_own(role);
      }
      if (!sum_piece<kIn, kWire, kOut, kUnweighted>(role, op, now, now_id, own_now) || is_last) return;
    }
  }

 private:
  // The own share of a piece is ready before the one in front of it is waited for: a network takes so long that the
  // last pieces of all warps come at once.
  static constexpr bool kIsAhead = kCrossesDomains;

  // Else its own share comes through the window.
  __device__ __forceinline__ static bool sends_own(const CombineRole& role) {
    return !kUnweighted && sends(role.p.phase);
  }
  __device__ __forceinline__ bool has_next(const CombineRole& role) const {
    return number < role.p.num_tokens * role.geometry.schedule.pieces;
  }
  __device__ __forceinline__ void prefetch(const CombineRole& role, const OwnEntriesAt& at) {
    id = at.id != nullptr ? __ldg(at.id) : -1;
    terms = at.terms.load(role.p.options.weighting);
  }
  // Loads the own rows of a piece, and the handle's entries of the piece after it.
  __device__ __forceinline__ void load_rows(const CombineRole& role) {
    rows_number = number;
    rows_id = id;
    if (sends_own(role)) {
      const Unit unit = role.geometry.schedule.unit(0, number);
      rows_terms = checked(role, terms, true);
      rows.load(role, rows_terms, lane_of_rows<kIn, kCount>(role, unit.piece));
      if (kHome && role.lane < role.p.shape.topk) {
        rows_weight.load(role.p, unit.token * role.p.shape.topk + role.lane);
      }
    }
    number += role.geometry.receivers;
    if (has_next(role)) prefetch(role, OwnEntriesAt::of(role, role.geometry.schedule.unit(0, number).token));
  }
  __device__ __forceinline__ void add_up_own(const CombineRole& role) {
    if (!sends_own(role)) return;
    const int piece = role.geometry.schedule.unit(0, rows_number).piece;
    if constexpr (kHome) weigh(role, piece);
    float total[kCount];
    partial_sum<kIn>(role, rows_terms, piece, rows, total);
    round_sum(own, total, role.p.hidden, piece);
  }
  __device__ __forceinline__ void weigh(const CombineRole& role, int piece) {
    const unsigned asked = __ballot_sync(~0u, rows_terms.row >= 0);
    if (rows_terms.row >= 0) rows_terms = with_weight(rows_terms, rows_weight.bits(role.p));
    if (__ballot_sync(~0u, rows_terms.row >= 0) == asked) return;
    rows.load(role, rows_terms, lane_of_rows<kIn, kCount>(role, piece));
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
