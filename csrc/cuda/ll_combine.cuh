// Low-latency combine: every rank adds up its own experts' rows of a token and stores one row into the home rank's
// window, in band; the home rank adds the ranks' rows in rank order. The table of contents is combine(), at the end.
#pragma once

#include "cuda/call.cuh"
#include "cuda/convert.cuh"
#include "cuda/launch.h"
#include "cuda/numbers.cuh"
#include "cuda/stamps.cuh"

namespace ep {

struct CombineRole : WarpRole {
  const LlCombineParams& p;
  const LlCombineGeometry& geometry;
  const LsaPeers& peers;

  __device__ int home_of(int index) const {
    const int home = peers.rank + index + (p.half == Half::kSend ? 0 : 1);
    return home >= p.shape.num_ranks ? home - p.shape.num_ranks : home;
  }
};

// The rows of a token here: lane k holds choice k.
struct Terms {
  int32_t row;  // kNoRow, kDroppedRow, or the row to add
  float weight;
};

// Weights that the home rank sends for this combine come with ids that say which choices count.
static __device__ __noinline__ Terms await_home_weight(const LlLayout& layout, const LsaPeers& peers,
                                                       const CallContext& call, int home, int token, Terms terms) {
  if (terms.row == kNoRow) return terms;
  const int lane = lane_id();
  const int per_word = layout.ids.per_word();
  const auto* ids = peers.local<uint64_t>(layout.id_words(call.bank, home, token));
  const uint32_t word = await_word(call, ids + lane / per_word, Phase::kWeights, home);
  if (layout.ids.get(word, lane % per_word) == layout.ids.none()) {
    terms.row = kDroppedRow;
    return terms;
  }
  const auto* weight = peers.local<uint64_t>(layout.weight(call.bank, home, token, lane));
  terms.weight = __uint_as_float(await_word(call, weight, Phase::kWeights, home));
  return terms;
}

__device__ __forceinline__ Terms load_terms(const CombineRole& role, int home, int token) {
  Terms terms{kNoRow, 1.0f};
  const int map_k = role.p.output.map_k();
  if (role.lane >= map_k) return terms;
  const int64_t entry = role.p.layout.slot(home, token) * map_k + role.lane;
  terms.row = __ldg(role.p.handle.rows + entry);
  // A dispatch that was given up leaves entries unwritten, and rows are asked for before that is known.
  if (terms.row >= role.geometry.output_rows) terms.row = kNoRow;
  if (role.p.weighting == Weighting::kDispatch) terms.weight = __ldg(role.p.handle.weights + entry);
  return terms;
}

// A lane's numbers of a piece of the first rows to add. More are rarer, and registers are few.
template <DType kIn, int kCount>
struct RowBatch {
#if !defined(EP_COMBINE_ROWS)
#define EP_COMBINE_ROWS 3
#endif
  static constexpr int kRows = EP_COMBINE_ROWS;
  Numbers<kIn, kCount> rows[kRows];

  // `mask`: the lanes whose rows are meant.
  __device__ __forceinline__ void load(const CombineRole& role, const Terms& terms, unsigned mask, int piece) {
    const int lane_index = piece * 32 + role.lane;
    const bool is_inside = lane_index * kCount < role.p.hidden;
    const int64_t row_bytes = static_cast<int64_t>(role.p.hidden) * size_of(kIn);
#pragma unroll
    for (int q = 0; q < kRows; q++) {
      const int32_t row = __shfl_sync(~0u, terms.row, __ffs(mask) - 1);
      if (mask != 0 && is_inside) {
        rows[q].load_nc(static_cast<const char*>(role.p.rows) + row * row_bytes, lane_index);
      } else {
        rows[q].fill(0);
      }
      mask &= mask - 1;
    }
  }
  __device__ __forceinline__ void load(const CombineRole& role, const Terms& terms, int piece) {
    load(role, terms, __ballot_sync(~0u, terms.row >= 0), piece);
  }
};

// This rank's share of a token, one piece of it. Products and sums are rounded one by one, in the order of k. `batch`
// holds the first rows.
template <DType kIn, int kCount>
__device__ __forceinline__ void partial_sum(const CombineRole& role, const Terms& terms, int piece,
                                            RowBatch<kIn, kCount>& batch, float (&sum)[kCount]) {
  unsigned mask = __ballot_sync(~0u, terms.row >= 0);
  const float nothing = mask == 0 ? 0.0f : kNothingYet;
#pragma unroll
  for (int i = 0; i < kCount; i++) sum[i] = nothing;
#pragma unroll 1
  while (mask != 0) {
#pragma unroll
    for (int q = 0; q < batch.kRows; q++) {
      if (mask == 0) return;
      batch.rows[q].add_product_to(sum, __shfl_sync(~0u, terms.weight, __ffs(mask) - 1));
      mask &= mask - 1;
    }
    batch.load(role, terms, mask, piece);
  }
}

// Where a warp is in its share of the work (UnitStride). A block waits only for blocks of its own index on other ranks,
// so blocks need not be resident together.
struct Units {
  int home, piece, token;

  __device__ __forceinline__ static Units begin(const CombineRole& role, const UnitStride& stride, int warp) {
    Units units;
    const int round = stride.by_homes.divide(warp);
    units.home = stride.by_homes.remainder(warp, round);
    const int number = round * role.at.num_blocks + role.at.block;
    units.token = role.geometry.by_pieces.divide(number);
    units.piece = role.geometry.by_pieces.remainder(number, units.token);
    return units;
  }
  __device__ __forceinline__ void advance(const UnitStride& stride, int pieces) {
    home += stride.home_step;
    const bool carry = home >= stride.homes;
    if (carry) home -= stride.homes;
    piece += carry ? stride.piece_step[1] : stride.piece_step[0];
    token += carry ? stride.token_step[1] : stride.token_step[0];
    if (piece >= pieces) {
      piece -= pieces;
      token++;
    }
  }
};

// ---- Sending: the partial sums of other ranks' tokens

// A unit to send, and its entries of the handle.
struct Outbound {
  Units units{};
  Terms terms{kNoRow, 1.0f};

  // Entries beyond a home's tokens were never written: ask for them, but do not look.
  __device__ __forceinline__ void load(const CombineRole& role) {
    terms = {kNoRow, 1.0f};
    if (units.token < role.p.shape.max_tokens) terms = load_terms(role, role.home_of(units.home), units.token);
  }
  // `tokens`: of rank `lane`
  __device__ __forceinline__ void hide_missing(const CombineRole& role, int tokens) {
    const int home = role.home_of(units.home);
    const int home_tokens =
        role.p.shape.num_ranks <= 32 ? __shfl_sync(~0u, tokens, home) : __ldg(role.p.handle.tokens + home);
    if (units.token >= home_tokens) terms.row = kNoRow;
  }
  __device__ __forceinline__ Outbound following(const CombineRole& role) const {
    Outbound next;
    next.units = units;
    next.units.advance(role.geometry.send, role.geometry.pieces);
    next.load(role);
    return next;
  }
};

// Adds up a unit. With weights of the home rank it waits for them, and asks for the rows again: some may not count.
template <DType kIn, DType kWire, int kCount>
__device__ __forceinline__ Numbers<kWire, kCount> add_up(const CombineRole& role, const CallContext& call, int home,
                                                         int token, int piece, Terms terms,
                                                         RowBatch<kIn, kCount>& batch) {
  if (role.p.weighting == Weighting::kHome) {
    terms = await_home_weight(role.p.layout, role.peers, call, home, token, terms);
    batch.load(role, terms, piece);
  }
  float sum[kCount];
  partial_sum<kIn>(role, terms, piece, batch, sum);
  Numbers<kWire, kCount> numbers;
  numbers.from(sum);
  return numbers;
}

// A sender's pipeline: the sum of one unit, the rows of the next, the handle's entries of the one after.
template <DType kIn, DType kWire, int kCount>
struct Sender {
  Outbound now, next, after;
  Numbers<kWire, kCount> sum;  // of `now`
  RowBatch<kIn, kCount> rows;  // of `next`
  int tokens = 0;              // of rank `lane`
  int most_tokens = 0;

  __device__ __forceinline__ void add_up_now(const CombineRole& role, const CallContext& call,
                                             RowBatch<kIn, kCount>& batch) {
    if (!__any_sync(~0u, now.terms.row != kNoRow)) return;
    sum = add_up<kIn, kWire>(role, call, role.home_of(now.units.home), now.units.token, now.units.piece, now.terms,
                             batch);
    sum.escape();
  }
  __device__ __forceinline__ bool has(const Outbound& out) const { return out.units.token < most_tokens; }

  // All but home weights is there before the epoch is known.
  __device__ __forceinline__ void begin(const CombineRole& role, const CallContext& call) {
    now.units = Units::begin(role, role.geometry.send, role.warp);
    now.load(role);
#pragma unroll 1
    for (int r = role.lane; r < role.p.shape.num_ranks; r += 32) tokens = max(tokens, __ldg(role.p.handle.tokens + r));
    next = now.following(role);
    most_tokens = __reduce_max_sync(~0u, tokens);
    if (!has(now)) return;
    now.hide_missing(role, tokens);
    RowBatch<kIn, kCount> first;
    first.load(role, now.terms, now.units.piece);
    if (has(next)) after = next.following(role);
    load_next(role);
    if (role.p.weighting != Weighting::kHome) add_up_now(role, call, first);
  }
  __device__ __forceinline__ void load_next(const CombineRole& role) {
    if (!has(next)) return;
    next.hide_missing(role, tokens);
    rows.load(role, next.terms, next.units.piece);
  }
  __device__ __forceinline__ void send_all(const CombineRole& role, const CallContext& call) {
    if (role.p.weighting == Weighting::kHome && has(now)) {
      RowBatch<kIn, kCount> first;
      add_up_now(role, call, first);
    }
#pragma unroll 1
    while (has(now)) {
      const int home = role.home_of(now.units.home), lane_index = now.units.piece * 32 + role.lane;
      if (__any_sync(~0u, now.terms.row != kNoRow) && lane_index * kCount < role.p.hidden) {
        char* slot = role.peers.at<char>(home, role.p.layout.row(call.bank, role.peers.rank, now.units.token));
        sum.store_remote(slot, lane_index);
      }
      if (!has(next)) return;
      now = next;
      next = after;
      RowBatch<kIn, kCount> batch = rows;
      load_next(role);
      after = next.following(role);
      add_up_now(role, call, batch);
    }
  }
};

// ---- Receiving: the sum over ranks

template <DType kOut, int kCount>
__device__ __forceinline__ void begin_sum(const LlCombineParams& p, int token, int lane_index, bool is_inside,
                                          bool has_terms, float (&sum)[kCount]) {
  const bool has_bias = p.bias[0] != nullptr || p.bias[1] != nullptr;
#pragma unroll
  for (int i = 0; i < kCount; i++) sum[i] = has_terms || has_bias ? kNothingYet : 0.0f;
  if (!has_bias) return;
#pragma unroll 1
  for (const void* bias : p.bias) {
    if (bias == nullptr || !is_inside) continue;
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

// A unit to receive, and what the handle says of this rank's own share of it.
struct Inbound {
  Units units{};
  int id = -1;  // of choice `lane`
  Terms terms{kNoRow, 1.0f};

  __device__ __forceinline__ bool exists(const CombineRole& role) const { return units.token < role.p.num_tokens; }
  __device__ __forceinline__ void load(const CombineRole& role) {
    if (!exists(role)) return;
    id = load_own_id(role, units.token);
    if (sends(role.p.half)) terms = load_terms(role, role.peers.rank, units.token);
  }
  __device__ __forceinline__ Inbound following(const CombineRole& role) const {
    Inbound next;
    next.units = units;
    next.units.advance(role.geometry.sum, role.geometry.pieces);
    next.load(role);
    return next;
  }
};

template <DType kIn, DType kWire, DType kOut, int kCount>
__device__ __forceinline__ bool sum_token(const CombineRole& role, const CallContext& call, const Inbound& in,
                                          const Numbers<kWire, kCount>& own) {
  constexpr int kBatch = 4;  // ranks polled together
  const LlCombineParams& p = role.p;
  const int rank = role.peers.rank, token = in.units.token, piece = in.units.piece;
  const int lane_index = piece * 32 + role.lane;
  const bool is_inside = lane_index * kCount < p.hidden;
  uint64_t mask =
      destinations(p.shape.num_ranks, Choice::of(in.id, p.shape.num_experts, role.geometry.by_local_experts));
  const bool own_is_local = sends(p.half) && (mask >> rank & 1) != 0;
  stamp(Stamp::kOwnDone, rank);
  float total[kCount];
  begin_sum<kOut>(p, token, lane_index, is_inside, mask != 0, total);
  Patience patience;
#pragma unroll 1
  while (mask != 0) {
    int ranks[kBatch];
    Numbers<kWire, kCount> numbers[kBatch];
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      ranks[q] = mask != 0 ? __ffsll(static_cast<long long>(mask)) - 1 : -1;
      mask &= mask - 1;
    }
    bool ok;
    do {
      ok = true;
#pragma unroll
      for (int q = 0; q < kBatch; q++) {
        numbers[q].fill(0);
        if (ranks[q] < 0 || (ranks[q] == rank && own_is_local) || !is_inside) continue;
        numbers[q].load_relaxed_sys(role.peers.local<char>(p.layout.row(call.bank, ranks[q], token)), lane_index);
      }
#pragma unroll
      for (int q = 0; q < kBatch; q++) ok = ok && numbers[q].have_arrived();
      ok = __all_sync(~0u, ok);
      if (!ok && __any_sync(~0u, patience.is_over(call, Phase::kPartials, ranks[0], token, piece))) return false;
    } while (!ok);
#pragma unroll
    for (int q = 0; q < kBatch; q++) {
      if (ranks[q] < 0) continue;
      if (ranks[q] == rank && own_is_local) {
        own.add_to(total);
        continue;
      }
      numbers[q].add_to(total);
      numbers[q].fill(kAbsent);
      char* slot = role.peers.local<char>(p.layout.row(call.bank, ranks[q], token));
      if (is_inside) numbers[q].store(slot, lane_index);
    }
  }
  Numbers<kOut, kCount> out;
  out.from(total);
  char* row = static_cast<char*>(p.out) + static_cast<int64_t>(token) * p.hidden * size_of(kOut);
  if (is_inside) out.store(row, lane_index);
  return true;
}

// A receiver's pipeline: the own share of one unit, the own rows of the next, the handle's entries of the one after.
// What is asked for late comes late: the loads of an SM queue up behind its remote stores.
template <DType kIn, DType kWire, DType kOut, int kCount>
struct Receiver {
  Inbound now, next;
  Numbers<kWire, kCount> own;  // share of `now`

  __device__ __forceinline__ void add_up_own(const CombineRole& role, const CallContext& call,
                                             RowBatch<kIn, kCount>& rows) {
    if (!sends(role.p.half) || !__any_sync(~0u, now.terms.row != kNoRow)) return;
    own = add_up<kIn, kWire>(role, call, role.peers.rank, now.units.token, now.units.piece, now.terms, rows);
  }
  // All but home weights is there before the epoch is known.
  __device__ __forceinline__ void begin(const CombineRole& role, const CallContext& call) {
    now.units = Units::begin(role, role.geometry.sum, role.warp - role.plan.receiver_warp0);
    now.load(role);
    if (!now.exists(role)) return;
    next = now.following(role);
    RowBatch<kIn, kCount> rows;
    rows.load(role, now.terms, now.units.piece);
    if (role.p.weighting != Weighting::kHome) add_up_own(role, call, rows);
  }
  __device__ __forceinline__ void sum_all(const CombineRole& role, const CallContext& call) {
    RowBatch<kIn, kCount> rows;
    if (role.p.weighting == Weighting::kHome && now.exists(role)) add_up_own(role, call, rows);
#pragma unroll 1
    while (now.exists(role)) {
      Inbound after;
      if (next.exists(role)) {
        rows.load(role, next.terms, next.units.piece);
        after = next.following(role);
      }
      if (!sum_token<kIn, kWire, kOut, kCount>(role, call, now, own)) return;
      if (!next.exists(role)) return;
      now = next;
      next = after;
      add_up_own(role, call, rows);
    }
  }
};

// ---- Weights of the home rank. Block 0 sends them all, because every block of a peer may wait for them.

static __device__ __noinline__ void send_home_weights(const CombineRole role, const CallContext& call) {
  const LlCombineParams& p = role.p;
  for (int token = role.warp; token < p.num_tokens; token += role.plan.warps) {
    Choice choice = Choice::of(load_own_id(role, token), p.shape.num_experts, role.geometry.by_local_experts);
    float weight = 0;
    if (role.lane < p.shape.topk) {
      const int64_t index = static_cast<int64_t>(token) * p.shape.topk + role.lane;
      weight = __ldg(p.home_weights + index);
      if (p.home_topk_idx != nullptr && !p.shape.valid(load_id(p.home_topk_idx, p.is_idx64, index))) choice = {};
    }
    send_routing(call, p.layout, role.peers, role.geometry.by_id_words, 0, token, choice, weight);
  }
}

// ---- Table of contents

template <DType kIn, DType kWire, DType kOut>
__device__ __forceinline__ void combine(const KernelArgs<LlCombineParams>& args, BlockPosition at) {
  constexpr int kCount = kLaneElements<kIn, kWire, kOut>;
  const LlCombineParams& p = args.params;
  const LlPlan& plan = args.plan;
  const LsaPeers& peers = args.peers;
  __shared__ CallContext call;
  const CombineRole role{{plan, at, lane_id(), warp_id()}, p, args.geometry, peers};
  stamp(Stamp::kStart, peers.rank);
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  const Opening opening = open_call(call, args, Kind::kCombine);

  const auto begin = [&] {
    const bool is_well = begin_call(call, args, opening);
    stamp(Stamp::kEpochKnown, peers.rank);
    if (is_well && p.weighting == Weighting::kHome && at.block == 0 && sends(p.half)) send_home_weights(role, call);
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
  } else if (sends(p.half) && role.is_sender() && args.geometry.homes > 0) {
    Sender<kIn, kWire, kCount> sender;
    sender.begin(role, call);
    if (!begin()) return;
    sender.send_all(role, call);
    stamp(Stamp::kSent, peers.rank);
  } else if (receives(p.half) && role.is_receiver()) {
    Receiver<kIn, kWire, kOut, kCount> receiver;
    receiver.begin(role, call);
    if (!begin()) return;
    receiver.sum_all(role, call);
  } else {
    begin();
  }
  stamp(Stamp::kEnd, peers.rank);
}

// ---- Scalars instead of rows: every thread takes some (token, choice).

__device__ __forceinline__ void scalars_home(const KernelArgs<LlCombineWeightsParams>& args, BlockPosition at) {
  const LlCombineWeightsParams& p = args.params;
  const LsaPeers& peers = args.peers;
  __shared__ CallContext call;
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
