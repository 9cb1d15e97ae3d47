// Low-latency combine: every rank adds up its own experts' rows of a token and stores one row into the home rank's
// window, in band; the home rank adds the ranks' rows in rank order. The table of contents is combine(), at the end.
#pragma once

#include "cuda/ll_home_weights.cuh"

namespace ep {

// ---- Sending: the partial sums of other ranks' tokens

// A sender adds up one unit at a time. While the unit's rows are on their way it learns which is next, and asks for
// that one's entries of the handle. kHome: the home rank gives the weights.
template <DType kIn, DType kWire, int kCount, bool kHome>
struct Sender {
  int index = 0;        // of the next unit in the block's deal
  uint32_t ticket = 0;  // of the next unit, if it needs one; lane 0 has it
  bool has_tickets = false;
  int tokens = 0;        // of rank `lane`
  int first_tokens = 0;  // of the first unit's home
  int most_tokens = 0;   // of a rank
  Unit next{};
  Terms next_terms{kNoRow, 1.0f};
  uint64_t next_weight = 0;  // kHome: the word that is there; of the first unit, nobody has looked
  Unit unit;                 // whose rows have been asked for
  Terms terms;
  bool is_any;  // of this rank's experts has a row of the token, if only a dropped one
  char* slot;   // in bank 0 of the home rank, of this lane's numbers
  RowBatch<kIn, kCount> rows;
  Numbers<kWire, kCount> sum;

  // All that needs no answer of the handle.
  __device__ __forceinline__ void ask_first(const CombineRole& role) {
    index = role.warp;
    next = role.geometry.deal.dealt_unit(role.at.block, index);
    if (next.token < role.p.shape.max_tokens) next_terms = load_terms(role, role.home_of(next.home), next.token);
    first_tokens = __ldg(role.p.handle.tokens + role.home_of(next.home));
    if (role.lane < role.p.shape.num_ranks) tokens = __ldg(role.p.handle.tokens + role.lane);
  }
  // begin() waits until the epoch is known; false: nothing may be sent. The first sum is ready by then, unless it waits
  // for weights. One loop, with the first unit in it: code that is there twice is fetched twice.
  template <class Begin>
  __device__ __forceinline__ void send_all(const CombineRole& role, const CallContext& call, const Begin& begin) {
    count_tokens(role);
    bool has_begun = false;
#pragma unroll 1
    while (has_next()) {
      load_rows(role, has_begun ? tokens_of(role, role.home_of(next.home)) : first_tokens);
      draw(role);
      if (kHome && !has_begun && !begin()) return;
      const uint64_t weight = next_weight;
      if (has_begun) find_next(role, call);
      if constexpr (kHome) weigh(role, call, weight);
      add_up(role);
      if (!kHome && !has_begun && !begin()) return;
      store(role, call);
      if (!has_begun) find_next(role, call);  // what the others wait for comes first
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
    has_tickets = role.geometry.deal.has_tickets(most_tokens);
  }
  // Where the weight of choice `lane` of a token comes from its home rank.
  __device__ __forceinline__ static const uint64_t* home_weight(const CombineRole& role, const CallContext& call,
                                                                int home, int token) {
    return role.peers.local<uint64_t>(role.p.layout.weight(call.bank, 0, 0, 0)) + entry_of(role, home, token);
  }
  __device__ __forceinline__ void load_next_terms(const CombineRole& role, const CallContext& call) {
    next_terms = {kNoRow, 1.0f};
    if (next.token >= role.p.shape.max_tokens) return;
    const int home = role.home_of(next.home);
    next_terms = load_terms(role, home, next.token);
    if (kHome && role.lane < role.p.shape.topk) {
      next_weight = ptx::ld_relaxed_sys(home_weight(role, call, home, next.token));
    }
  }
  // Asks for a ticket if the next unit needs one; find_next() looks at it.
  __device__ __forceinline__ void draw(const CombineRole& role) {
    const UnitDeal& deal = role.geometry.deal;
    if (!has_tickets || deal.is_dealt(index + deal.warps)) return;
    testing_point(Point::kBeforeTicket);
    const int group = deal.group_of(role.at.block);
    const auto last = static_cast<uint32_t>(deal.last_ticket(group, most_tokens));
    uint32_t drawn;  // another value in other lanes would meet it in a move that waits
    if (role.lane == 0) drawn = ptx::atom_inc_relaxed_gpu(&role.state->unit_tickets[group].next, last);
    ticket = drawn;
  }
  __device__ __forceinline__ void find_next(const CombineRole& role, const CallContext& call) {
    const UnitDeal& deal = role.geometry.deal;
    index += deal.warps;
    if (deal.is_dealt(index)) {
      next = deal.dealt_unit(role.at.block, index);
    } else if (has_tickets) {
      next = deal.ticket_unit(deal.group_of(role.at.block), static_cast<int>(__shfl_sync(~0u, ticket, 0)));
    } else {
      next.token = most_tokens;
    }
    load_next_terms(role, call);
  }
  // Makes the next unit the one to add up, and asks for its rows.
  __device__ __forceinline__ void load_rows(const CombineRole& role, int home_tokens) {
    unit = next;
    const int home = role.home_of(unit.home);
    terms = checked(role, next_terms, unit.token < home_tokens);
    rows.load(role, terms, unit.piece);
    is_any = __any_sync(~0u, terms.row != kNoRow);
    const int lane_index = unit.piece * 32 + role.lane;
    slot = role.peers.at<char>(home, role.p.layout.row(0, role.peers.rank, unit.token)) +
           lane_index * static_cast<int>(sizeof sum);
    if (lane_index * kCount >= role.p.hidden) slot = nullptr;
  }
  // The weights of the unit's home rank, which had sent `seen`. Mostly they are all there. Waits inline: after a call
  // the compiler takes a warp that was together before for one that still is, and lanes that waited in it are not.
  __device__ __forceinline__ void weigh(const CombineRole& role, const CallContext& call, uint64_t seen) {
    const bool counted = terms.row >= 0;
    auto bits = static_cast<uint32_t>(seen);
    terms.weight = __uint_as_float(bits);
    if (!__any_sync(~0u, counted && (!is_tagged(seen, call.tag) || bits == kSkippedWeight))) return;
    if (counted) {
      const int home = role.home_of(unit.home);
      if (!is_tagged(seen, call.tag)) {
        bits = await_word(call, home_weight(role, call, home, unit.token), Phase::kWeights, home);
      }
      terms = with_weight(terms, bits);
    }
    __syncwarp();
    // Rarely a choice does not count here that counted at dispatch.
    if (__any_sync(~0u, counted && terms.row < 0)) rows.load(role, terms, unit.piece);
  }
  __device__ __forceinline__ void add_up(const CombineRole& role) {
    if (!is_any) return;
    float total[kCount];
    partial_sum<kIn>(role, terms, unit.piece, rows, total);
    sum.from(total);
    sum.escape();
  }
  __device__ __forceinline__ void store(const CombineRole& role, const CallContext& call) const {
    testing_point(Point::kBetweenRows, call, unit.token);
    const int64_t bank_offset = call.bank * static_cast<int64_t>(role.p.layout.row_bank_bytes);
    if (is_any && slot != nullptr) sum.store_remote(slot + bank_offset, 0);
  }
};

// ---- Receiving: the sum over ranks

template <DType kOut, int kCount>
__device__ __forceinline__ void begin_sum(const LlCombineParams& p, int token, int lane_index, bool has_terms,
                                          float (&sum)[kCount]) {
  const bool has_bias = p.bias[0] != nullptr || p.bias[1] != nullptr;
#pragma unroll
  for (int i = 0; i < kCount; i++) sum[i] = has_terms || has_bias ? kNothingYet : 0.0f;
  if (!has_bias) return;
#pragma unroll 1
  for (const void* bias : p.bias) {
    if (bias == nullptr) continue;
    Numbers<kOut, kCount> numbers;
    numbers.load_nc(static_cast<const char*>(bias) + static_cast<int64_t>(token) * p.hidden * size_of(kOut),
                    lane_index);
    numbers.add_to(sum);
  }
}

__device__ __forceinline__ int load_own_id(const CombineRole& role, int token) {
  if (role.lane >= role.p.shape.topk) return -1;
  return __ldg(role.p.handle.ids + token * role.p.shape.topk + role.lane);
}

// The ranks' sums of a piece, as they arrive in the own window: up to four ranks at a time, in ascending order. Lanes
// past the row's end do what the last lane inside does.
template <DType kWire, int kCount>
struct Partials {
  static constexpr int kBatch = 4;
  static constexpr uint32_t kNone = 0xFF;
  uint32_t mask, high_mask;  // ranks that are not taken yet; bit i of `mask` is rank first + i
  uint32_t first = 0;
  uint32_t local_rank;  // whose share does not travel
  uint32_t ranks;       // of the batch, in bytes: registers are few
  char* slots;          // of rank 0's row, this lane's numbers
  Numbers<kWire, kCount> numbers[kBatch];

  __device__ __forceinline__ Partials(const CombineRole& role, const CallContext& call, uint64_t sources,
                                      const Unit& unit, int lane_index)
      : mask(static_cast<uint32_t>(sources)),
        high_mask(static_cast<uint32_t>(sources >> 32)),
        local_rank(sends(role.p.half) ? role.peers.rank : kNone - 1),
        slots(ptx::opaque(role.peers.local<char>(role.p.layout.row(call.bank, 0, unit.token)) +
                          lane_index * static_cast<int>(sizeof *numbers))) {}

  __device__ __forceinline__ bool has_more() const { return (mask | high_mask) != 0; }
  __device__ __forceinline__ void begin_batch() {
    if (mask == 0) {
      mask = high_mask;
      high_mask = 0;
      first = 32;
    }
    ranks = ~0u;
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      if (mask == 0) break;
      ranks ^= ((first + __ffs(mask) - 1) ^ kNone) << (8 * q);
      mask &= mask - 1;
    }
  }
  __device__ __forceinline__ uint32_t rank_of(int q) const { return ranks >> (8 * q) & kNone; }
  __device__ __forceinline__ bool travels(uint32_t rank) const { return rank != kNone && rank != local_rank; }
  __device__ __forceinline__ char* slot_of(const CombineRole& role, uint32_t rank) const {
    return slots + static_cast<uint64_t>(rank) * role.geometry.source_bytes;
  }

  // Waits for the batch. False: the wait was given up.
  __device__ __forceinline__ bool await(const CombineRole& role, const CallContext& call, const Unit& unit,
                                        LeanPatience& patience) {
    while (true) {
      ranks = ptx::opaque(ranks);  // addresses are worked out again
      if (have_arrived(role, call)) return true;
      if (is_over(role, call, unit, patience)) return false;
    }
  }
  __device__ __forceinline__ bool have_arrived(const CombineRole& role, const CallContext& call) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      numbers[q].fill(0);
      const uint32_t r = rank_of(q);
      if (travels(r)) numbers[q].load_relaxed_sys(slot_of(role, r), 0);
    }
    bool ok = true;
#pragma unroll
    for (int q = 0; q < kBatch; q++) ok = ok && numbers[q].have_arrived();
    if (has_bug(Bug::kTornRows, call.kind)) ok = numbers[0].have_arrived();
    return __all_sync(~0u, ok);
  }
  __device__ __forceinline__ uint32_t rank_of_lane(const CombineRole& role) const {
    return role.lane < kBatch ? ranks >> (8 * role.lane) & kNone : kNone;
  }
  __device__ __forceinline__ unsigned absent(const CombineRole& role) const {
    const uint32_t r = rank_of_lane(role);
    const auto* word = reinterpret_cast<const uint32_t*>(slot_of(role, r));
    return __ballot_sync(~0u, travels(r) && ptx::ld_relaxed_sys(word) == kAbsent);
  }
  __device__ __forceinline__ bool is_over(const CombineRole& role, const CallContext& call, const Unit& unit,
                                          LeanPatience& patience) const {
    if (!patience.is_due()) return false;
    unsigned waited_for = absent(role);
    if (waited_for == 0) waited_for = __ballot_sync(~0u, travels(rank_of_lane(role)));  // part of each has come
    const auto peer = static_cast<int>(rank_of(__ffs(static_cast<int>(waited_for)) - 1));
    return __any_sync(~0u, patience.look(call, Phase::kPartials, peer, unit.token, unit.piece));
  }

  // In the order of ranks. Slots are free again.
  __device__ __forceinline__ void add_to(const CombineRole& role, const CallContext& call, int token,
                                         const Numbers<kWire, kCount>& own, float (&total)[kCount]) {
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      const uint32_t r = rank_of(q);
      if (r == kNone) break;
      if (r == local_rank) numbers[q] = own;
      numbers[q].add_to(total);
      if (r == local_rank) continue;
      numbers[q].fill(kAbsent);
      testing_point(Point::kBeforeReset, call, token);
      if (!(has_bug(Bug::kSkippedReset, call.kind) && token == 0)) numbers[q].store(slot_of(role, r), 0);
    }
  }
};

// Adds up piece `number`. `id`: of choice `lane`. False: a wait was given up.
template <DType kWire, DType kOut, int kCount>
__device__ __forceinline__ bool sum_piece(const CombineRole& role, const CallContext& call, int number, int id,
                                          const Numbers<kWire, kCount>& own) {
  const LlCombineParams& p = role.p;
  const Unit unit = role.geometry.deal.unit(0, number);
  const int lane_index = min(unit.piece * 32 + role.lane, p.hidden / kCount - 1);
  const uint64_t sources =
      destinations(p.shape.num_ranks, Choice::of(id, p.shape.num_experts, role.geometry.by_local_experts));
  stamp(Stamp::kOwnDone, role.peers.rank);
  Partials<kWire, kCount> partials(role, call, sources, unit, lane_index);
  float total[kCount];
  begin_sum<kOut>(p, unit.token, lane_index, sources != 0, total);
  LeanPatience patience;
#pragma unroll 1
  while (partials.has_more()) {
    partials.begin_batch();
    if (!partials.await(role, call, unit, patience)) return false;
    partials.add_to(role, call, unit.token, own, total);
  }
  Numbers<kOut, kCount> out;
  out.from(total);
  out.store(static_cast<char*>(p.out) + static_cast<int64_t>(unit.token) * p.hidden * size_of(kOut), lane_index);
  return true;
}

// A receiver asks for its own rows of a piece while it waits for the others' of the one before: what is asked for late
// comes late, as the loads of an SM queue up behind its remote stores. Pieces are known by their numbers (UnitDeal).
template <DType kIn, DType kWire, DType kOut, int kCount, bool kHome>
struct Receiver {
  int number = 0;             // of the piece whose entries of the handle have been asked for
  int id = -1;                // of choice `lane`
  Terms terms{kNoRow, 1.0f};  // of the own share
  int rows_number = 0;        // of the piece whose own rows have been asked for
  int rows_id = -1;
  Terms rows_terms;
  OwnHomeWeight rows_weight;
  RowBatch<kIn, kCount> rows;
  Numbers<kWire, kCount> own;  // share of the piece that is added up

  __device__ __forceinline__ void ask_first(const CombineRole& role) {
    number = role.receiver();
    ask(role);
  }
  // begin() as a sender's. The first share needs nothing of this call, and is ready by then where SMs have little to
  // send.
  template <class Begin>
  __device__ __forceinline__ void sum_all(const CombineRole& role, const CallContext& call, const Begin& begin) {
    bool has_begun = false;
    if (role.geometry.is_busy || !has_next(role)) {
      if (!begin() || !has_next(role)) return;
      has_begun = true;
    }
    load_rows(role);
#pragma unroll 1
    while (true) {
      add_up_own(role);
      if (!has_begun && !begin()) return;
      has_begun = true;
      const int now = rows_number, now_id = rows_id;
      const bool is_last = !has_next(role);
      if (!is_last) load_rows(role);
      if (!sum_piece<kWire, kOut, kCount>(role, call, now, now_id, own) || is_last) return;
    }
  }

 private:
  __device__ __forceinline__ bool has_next(const CombineRole& role) const {
    return number < role.p.num_tokens * role.geometry.deal.pieces;
  }
  __device__ __forceinline__ void ask(const CombineRole& role) {
    if (!has_next(role)) return;
    const int token = role.geometry.deal.unit(0, number).token;
    id = load_own_id(role, token);
    if (sends(role.p.half)) terms = load_terms(role, role.peers.rank, token);
  }
  // Asks for the own rows of a piece and the handle's entries of the one after.
  __device__ __forceinline__ void load_rows(const CombineRole& role) {
    rows_number = number;
    rows_id = id;
    if (sends(role.p.half)) {
      const Unit unit = role.geometry.deal.unit(0, number);
      rows_terms = checked(role, terms, true);
      rows.load(role, rows_terms, unit.piece);
      if (kHome && role.lane < role.p.shape.topk) {
        rows_weight.load(role.p, unit.token * role.p.shape.topk + role.lane);
      }
    }
    number += role.geometry.receivers;
    ask(role);
  }
  __device__ __forceinline__ void add_up_own(const CombineRole& role) {
    if (!sends(role.p.half)) return;
    const int piece = role.geometry.deal.unit(0, rows_number).piece;
    if constexpr (kHome) weigh(role, piece);
    float total[kCount];
    partial_sum<kIn>(role, rows_terms, piece, rows, total);
    own.from(total);
  }
  __device__ __forceinline__ void weigh(const CombineRole& role, int piece) {
    const unsigned asked = __ballot_sync(~0u, rows_terms.row >= 0);
    if (rows_terms.row >= 0) rows_terms = with_weight(rows_terms, rows_weight.bits(role.p));
    if (__ballot_sync(~0u, rows_terms.row >= 0) != asked) rows.load(role, rows_terms, piece);
  }
};

// ---- Table of contents

template <DType kIn, DType kWire, DType kOut, bool kHome>
__device__ __forceinline__ void combine(const KernelArgs<LlCombineParams>& args, BlockPosition at) {
  constexpr int kCount = kLaneElements<kIn, kWire, kOut>;
  const LlCombineParams& p = args.params;
  const LlPlan& plan = args.plan;
  const LsaPeers& peers = args.peers;
  EP_SHARED(CallContext, call);
  const CombineRole role{{plan, at, lane_id(), warp_id()}, p, args.geometry, peers, args.state};
  stamp(Stamp::kStart, peers.rank);
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  Sender<kIn, kWire, kCount, kHome> sender;
  Receiver<kIn, kWire, kOut, kCount, kHome> receiver;
  const bool is_sender = sends(p.half) && role.is_sender() && args.geometry.homes > 0;
  const bool is_receiver = !is_sender && receives(p.half) && role.is_receiver();
  HomeWeights<kHome> home_weights(role);
  const Opening opening = open_call(call, args, Kind::kCombine, [&] {
    if (is_sender) sender.ask_first(role);
    if (is_receiver) receiver.ask_first(role);
    home_weights.ask(role);
  });

  const auto begin = [&] {
    const bool is_well = begin_call(call, args, opening);
    stamp(Stamp::kEpochKnown, peers.rank);
    if (is_well) home_weights.send(role, call);
    return is_well;
  };
  // What a warp adds up first is ready when the epoch is known. The opener is neither sender nor receiver.
  if (is_opener()) {
    const bool is_well = begin();
    if (is_well && sends(p.half) && role.is_control()) send_records(call, p.layout, peers);
    if (receives(p.half)) advance_epoch(args, opening, Kind::kCombine, at);
    if (!is_well) return;
    if (sends(p.half) && role.is_creditor()) send_credits(call, p.layout, peers);
    if (receives(p.half) && role.is_control()) check_records(call, p.layout, peers, p.wait_cost);
  } else if (is_sender) {
    sender.send_all(role, call, [&] {
      if (!begin()) return false;
      testing_point(Point::kBeforeRows, call);
      return true;
    });
    stamp(Stamp::kSent, peers.rank);
  } else if (is_receiver) {
    receiver.sum_all(role, call, [&] {
      if (!begin()) return false;
      testing_point(Point::kBeforeReceive, call);
      return true;
    });
  } else {
    begin();
  }
  stamp(Stamp::kEnd, peers.rank);
}

// ---- Scalars instead of rows: every thread takes some (token, choice).

__device__ __forceinline__ void scalars_home(const KernelArgs<LlCombineWeightsParams>& args, BlockPosition at) {
  const LlCombineWeightsParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(CallContext, call);
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  const Opening opening = open_call(call, args, Kind::kCombine);
  const bool is_well = begin_call(call, args, opening);
  advance_epoch(args, opening, Kind::kCombine, at);
  if (!is_well) return;
  const int topk = p.shape.topk, map_k = p.output.map_k();
  const bool expert_rows = has_expert_rows(p.output.layout);
  // Entry (token, k) is the same block's on every rank, for all homes: a block waits only for blocks of its own index.
  const int first = at.block * static_cast<int>(blockDim.x) + threadIdx.x;
  const int step = at.num_blocks * static_cast<int>(blockDim.x);
  const bool is_control = at.block == 0 && threadIdx.x < 32;
  if (is_control) {
    send_records(call, p.layout, peers);
    send_credits(call, p.layout, peers);
  }
  testing_point(Point::kBeforeRows, call);
  for (int i = first; i < p.shape.max_tokens * topk; i += step) {
    const int token = i / topk, k = i % topk;
    for (int home = 0; home < p.shape.num_ranks; home++) {
      if (token >= p.handle.tokens[home]) continue;
      const int32_t row = p.handle.rows[p.layout.slot(home, token) * map_k + (expert_rows ? k : 0)];
      if (row == kNoRow) continue;
      const float value = row < 0 ? 0.0f : p.values[expert_rows ? row : static_cast<int64_t>(row) * topk + k];
      auto* target = peers.at<uint64_t>(home, p.layout.weight(call.bank, peers.rank, token, k));
      ptx::st_relaxed_sys(target, tagged(__float_as_uint(value), call.tag));
    }
  }
  if (is_control) check_records(call, p.layout, peers);
  testing_point(Point::kBeforeReceive, call);
  for (int i = first; i < p.num_tokens * topk; i += step) {
    const int id = p.handle.ids[i];
    uint32_t bits = 0;
    if (id >= 0) {
      const int owner = p.shape.owner(id);
      const auto* word = peers.local<uint64_t>(p.layout.weight(call.bank, owner, i / topk, i % topk));
      bits = await_word(call, word, Phase::kScalars, owner);
    }
    p.out[i] = __uint_as_float(bits);
  }
}

}  // namespace ep
