// What low-latency combine sends: partial sums of other ranks' tokens.
#pragma once

#include "cuda/ll/combine/home_weights.cuh"
#include "cuda/ll/combine/unweighted_rows.cuh"

namespace ep {
inline namespace EP_KERNELS {

// A sender adds up one unit at a time. While the unit's rows are loaded it finds out which is next, and loads that
// one's entries of the handle. kHome: the home rank gives the weights. kUnweighted: and weights the rows itself.
template <DType kIn, DType kWire, int kCount, bool kHome, bool kUnweighted>
struct Sender {
  int index = 0;        // of the next unit in the block's schedule
  uint32_t ticket = 0;  // of the next unit, if it needs one; lane 0 has it
  bool has_tickets = false;
  int tokens = 0;        // of rank `lane`
  int first_tokens = 0;  // of the first unit's home
  int most_tokens = 0;   // of a rank
  Unit next{};
  const char* next_rows = nullptr;  // lane_of_rows()
  Terms next_terms{kNoRow, 1.0f};
  TermsAt terms_at;  // of the first unit
  const int *tokens_at, *all_tokens_at;
  uint64_t next_weight = 0;  // kHome: the word that is there; of the first unit, not yet used
  Unit unit;                 // whose rows are being loaded
  Terms terms;
  bool is_any;  // of this rank's experts has a row of the token, if only a dropped one
  bool is_token;
  char* slot;  // in bank 0 of the home rank, of this lane's numbers
  RowBatch<kIn, kCount> rows;
  Numbers<kWire, kCount> sum;

  // All that needs no entry of the handle, and then the loads of the first entries.
  __device__ __forceinline__ void locate_first(const CombineRole& role) {
    index = role.warp;
    next = role.geometry.schedule.static_unit(role.at.block, index);
    const int home = role.home_of(next.home);
    terms_at = TermsAt::of(role, home, next.token);
    if (next.token >= role.p.shape.max_tokens) terms_at.row = nullptr;
    next_rows = ptx::opaque(lane_of_rows<kIn, kCount>(role, next.piece));
    tokens_at = ptx::opaque(role.p.handle.tokens + home);
    all_tokens_at = ptx::opaque(role.p.handle.tokens + role.lane);
  }
  __device__ __forceinline__ void prefetch_first(const CombineRole& role) {
    next_terms = terms_at.load(role.p.options.weighting);
    first_tokens = __ldg(tokens_at);
    if (role.lane < role.p.shape.num_ranks) tokens = __ldg(all_tokens_at);
  }
  // begin() waits until the epoch is known; false: nothing may be sent. The first sum is ready by then, unless it waits
  // for weights. One loop, with the first unit in it: code that is there twice is fetched twice.
  template <class Begin>
  __device__ __forceinline__ void send_all(const CombineRole& role, const WarpContext& op, const Begin& begin) {
    count_tokens(role);
    bool has_begun = false;
#pragma unroll 1
    while (has_next()) {
      load_rows(role, has_begun ? tokens_of(role, role.home_of(next.home)) : first_tokens);
      draw(role);
      if (kHome && !has_begun && !begin()) return;
      const uint64_t weight = next_weight;
      if (has_begun) find_next(role, op);
      if constexpr (kUnweighted) {
        if (is_any) send_unweighted<kIn>(role, op, unit, terms, rows);
        if constexpr (kCrossesDomains) tell_presence(role, op);
      } else {
        if constexpr (kHome) weigh(role, op, weight);
        add_up(role);
        if (!kHome && !has_begun && !begin()) return;
        store(role, op);
      }
      if (!has_begun) find_next(role, op);  // what the other ranks wait for comes first
      has_begun = true;
    }
    if (!has_begun) begin();
  }

 private:
  __device__ __forceinline__ bool has_next() const { return next.token < most_tokens; }
  __device__ __forceinline__ int tokens_of(const CombineRole& role, int home) const {
    return role.p.shape.num_ranks <= 32 ? __shfl_sync(~0u, tokens, home) : __ldg(role.p.handle.tokens + home);
  }
  __device__ __forceinline__ void count_tokens(const CombineRole& role) {
#pragma unroll 1
    for (int r = role.lane + 32; r < role.p.shape.num_ranks; r += 32) {
      most_tokens = max(most_tokens, __ldg(role.p.handle.tokens + r));
    }
    most_tokens = __reduce_max_sync(~0u, max(tokens, most_tokens));
    most_tokens = min(most_tokens, role.p.shape.max_tokens);  // of a handle that was changed
    has_tickets = role.geometry.schedule.has_tickets(most_tokens);
  }
  // Where the weight of choice `lane` of a token comes from its home rank.
  __device__ __forceinline__ static const uint64_t* home_weight(const CombineRole& role, const WarpContext& op,
                                                                int home, int token) {
    if (kMasksRanks) return role.peers.local<uint64_t>(role.p.offsets.weight<true>(op.bank, home, token, role.lane));
    return role.peers.local<uint64_t>(role.p.offsets.weight<false>(op.bank, 0, 0, 0)) + entry_of(role, home, token);
  }
  __device__ __forceinline__ void load_next_terms(const CombineRole& role, const WarpContext& op) {
    next_terms = {kNoRow, 1.0f};
    if (next.token >= role.p.shape.max_tokens) return;
    const int home = role.home_of(next.home);
    next_rows = ptx::opaque(lane_of_rows<kIn, kCount>(role, next.piece));
    next_terms = TermsAt::of(role, home, next.token).load(role.p.options.weighting);
    if (kHome && !kUnweighted && role.lane < role.p.shape.topk) {
      next_weight = ptx::ld_relaxed_sys(home_weight(role, op, home, next.token));
    }
  }
  // Draws a ticket if the next unit needs one; find_next() uses it.
  __device__ __forceinline__ void draw(const CombineRole& role) {
    const WorkSchedule& schedule = role.geometry.schedule;
    if (!has_tickets || schedule.is_static(index + schedule.warps)) return;
    testing_point(Point::kBeforeTicket);
    const int group = schedule.group_of(role.at.block);
    const auto last = static_cast<uint32_t>(schedule.last_ticket(group, most_tokens));
    uint32_t drawn;  // another value in other lanes would meet it in a move that waits
    if (role.lane == 0) drawn = ptx::atom_inc_relaxed_gpu(&role.state->unit_tickets[group].next, last);
    ticket = drawn;
  }
  __device__ __forceinline__ void find_next(const CombineRole& role, const WarpContext& op) {
    const WorkSchedule& schedule = role.geometry.schedule;
    index += schedule.warps;
    if (schedule.is_static(index)) {
      next = schedule.static_unit(role.at.block, index);
    } else if (has_tickets) {
      next = schedule.dynamic_unit(schedule.group_of(role.at.block), static_cast<int>(__shfl_sync(~0u, ticket, 0)));
    } else {
      next.token = most_tokens;
    }
    load_next_terms(role, op);
  }
  // Makes the next unit the one to add up, and loads its rows.
  __device__ __forceinline__ void load_rows(const CombineRole& role, int home_tokens) {
    unit = next;
    is_token = unit.token < home_tokens;
    terms = checked(role, next_terms, is_token);
    rows.load(role, terms, next_rows);
    is_any = __any_sync(~0u, terms.row != kNoRow);
    const int lane_index = unit.piece * 32 + role.lane;
    const int home = role.home_of(unit.home);
    slot = role.peers.at<char>(target_of(role.peers, home),
                               role.p.offsets.row<kMasksRanks>(0, slot_source(role.peers, home), unit.token)) +
           lane_index * sum.kLaneBytes;
    if (lane_index * kCount >= role.p.hidden) slot = nullptr;
  }
  // The weights of the unit's home rank, which had sent `seen`. Mostly they are all there. Waits inline: after a call
  // the compiler takes a warp that was converged before for one that still is, and lanes that waited in it are not.
  __device__ __forceinline__ void weigh(const CombineRole& role, const WarpContext& op, uint64_t seen) {
    const bool counted = terms.row >= 0;
    auto bits = static_cast<uint32_t>(seen);
    terms.weight = __uint_as_float(bits);
    if (!__any_sync(~0u, counted && (!is_tagged(seen, op.tag) || bits == kSkippedWeight))) return;
    if (counted) {
      const int home = role.home_of(unit.home);
      if (!is_tagged(seen, op.tag)) {
        bits = await_word(op, home_weight(role, op, home, unit.token), Awaited::kWeights, home);
        if constexpr (kMasksFarRanks) __threadfence();  // the mask of a late rank is seen before its sum
      }
      terms = with_weight(terms, bits);
    }
    __syncwarp();
    // Rarely a choice does not count here that counted at dispatch.
    if (__any_sync(~0u, counted && terms.row < 0)) rows.load(role, terms, lane_of_rows<kIn, kCount>(role, unit.piece));
  }
  __device__ __forceinline__ void add_up(const CombineRole& role) {
    if (!is_any) return;
    float total[kCount];
    partial_sum<kIn>(role, terms, unit.piece, rows, total);
    sum.from(total);
    sum.escape();
  }
  __device__ __forceinline__ void store(const CombineRole& role, const WarpContext& op) const {
    testing_point(Point::kBetweenRows, op, unit.token);
    const int64_t bank_offset = op.bank * static_cast<int64_t>(role.p.offsets.row_bank_bytes);
    const int home = role.home_of(unit.home);
    // A sum for another domain goes to a rank of the own one, which waits for it.
    if (is_any && slot != nullptr && (!reaches(role.peers, home) || !is_masked_now(op, home))) {
      sum.store_remote(slot + bank_offset, place_of<kWire>(role.p.hidden, unit.piece * 32 + role.lane));
    }
    if constexpr (kCrossesDomains) tell_presence(role, op);
  }
  // The rank that adds up the domain for a home rank learns of every token whether this rank has a partial sum of it,
  // and of unweighted rows which there are.
  __device__ __forceinline__ void tell_presence(const CombineRole& role, const WarpContext& op) const {
    const int home = role.home_of(unit.home);
    const unsigned mask = kUnweighted ? __ballot_sync(~0u, terms.row >= 0) : 0;
    if (!is_token || unit.piece != 0 || role.lane != 0 || reaches(role.peers, home)) return;
    const Offset word = role.p.offsets.id_words<kMasksRanks>(op.bank, slot_source(role.peers, home), unit.token);
    ptx::st_relaxed_sys(role.peers.at<uint64_t>(target_of(role.peers, home), word),
                        tagged(is_any ? LlOffsets::kHasSum | mask : 0, op.tag));
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
