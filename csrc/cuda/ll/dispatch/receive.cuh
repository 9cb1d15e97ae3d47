// What low-latency dispatch receives: the routing, and the rows, piece by piece, to their places.
#pragma once

#include "cuda/ll/dispatch/info.cuh"
#include "cuda/ll/dispatch/send.cuh"

namespace ep {
inline namespace EP_KERNELS {

// Where the weight of choice `lane` of a row arrives, and what the lane has seen there.
struct IncomingWeight {
  const uint64_t* word;  // in bank 0 until prefetch()
  uint64_t seen;
};

// A row's numbers: the handle's map and weights, and what the output layout has apart from the row. Once for each slot.
template <bool kExpertRows>
__device__ __forceinline__ void store_row_info(const DispatchRole& role, const WarpContext& op, int source, int token,
                                               bool wanted, uint32_t expert, int32_t row, const IncomingWeight& given) {
  const LlDispatchParams& p = role.p;
  const int slot = source * p.shape.max_tokens + token, lane = role.lane, topk = p.shape.topk;
  const int map_k = kExpertRows ? topk : 1;
  const unsigned any = __ballot_sync(~0u, wanted);
  const int32_t token_row = kExpertRows || any == 0 ? row : __shfl_sync(~0u, row, __ffs(any) - 1);
  if (lane < map_k) p.handle.rows[static_cast<int64_t>(slot) * map_k + lane] = token_row;
  const bool has_weight = wanted || (!kExpertRows && p.options.all_weights && any != 0 && lane < topk);
  float weight = 0;
  if (has_weight && is_tagged(given.seen, op.tag)) {
    weight = __uint_as_float(static_cast<uint32_t>(given.seen));
  } else if (has_weight) {
    weight = __uint_as_float(await_word(op, given.word, Awaited::kWeights, source));
  }
  if constexpr (kExpertRows) {
    if (!wanted) return;
    p.handle.weights[static_cast<int64_t>(slot) * map_k + lane] = weight;
    if (row < 0) return;
    p.out_weights[row] = weight;
    if (p.src_info != nullptr) p.src_info[row] = token;
    if (p.row_expert != nullptr) p.row_expert[row] = static_cast<int>(expert);
    return;
  }
  if (token_row < 0 || any == 0 || lane >= topk) return;
  const int64_t entry = static_cast<int64_t>(token_row) * topk + lane;
  p.out_weights[entry] = weight;
  store_id(p.out_topk_idx, p.is_idx64, entry, wanted ? static_cast<int>(expert) : -1);
}

// A piece to place: the own rank's come first, then the others' in turn, so that no source waits for another.
struct ReceiveUnit {
  int source, token, piece;

  __device__ __forceinline__ static ReceiveUnit of(const DispatchRole& role, int unit) {
    const LlDispatchGeometry& g = role.geometry;
    ReceiveUnit result{role.peers.rank, 0, 0};
    int rest = unit;
    if (unit >= g.own_units) {
      const int turn = g.by_others.divide(unit - g.own_units);
      result.source -= 1 + g.by_others.remainder(unit - g.own_units, turn);
      if (result.source < 0) result.source += role.p.shape.num_ranks;
      rest = turn;
    }
    result.token = g.by_receive_pieces.divide(rest);
    result.piece = g.by_receive_pieces.remainder(rest, result.token);
    return result;
  }
};

// The piece of a row that a link brings for this rank alone, from where the network puts it (links/dispatch.cuh). A
// warp calls. False: the wait was given up.
template <int kSteps, int kSides>
__device__ bool load_from_link(const DispatchRole& role, const WarpContext& op, const RoutingBitmap& bitmap,
                               const ReceiveUnit& unit, Piece<kSteps, kSides>& piece);

// A piece on its way to its places: loaded before it is known whether it comes, used afterwards. What can be computed
// of it before the routing is known is in registers by then.
template <Encoding kEncoding, int kSteps, OutputLayout kLayout>
struct Incoming {
  static constexpr bool kAimsAhead = kEncoding == Encoding::kFloat;  // other payloads leave no registers for it
  ReceiveUnit unit;
  ptx::SharedAddress tokens_at, id_at;  // in RoutingBitmap: tokens of the source, id of choice `lane`
  int id_shift;
  uint32_t id_mask;
  int slot;
  RoutingBitmap::Span before;  // slots whose rows lie before this one's
  bool is_own;                 // lies in x; a row of another rank, or of a split call, lies in the window
  bool is_by_link;             // lies where a link brings it
  bool has_numbers;            // the warp stores the row's numbers
  char* staged;                // in bank 0 until prefetch()
  RowWriter<kEncoding, kSteps> writer;
  Raw<kEncoding, kSteps> raw;
  PieceOf<kEncoding, kSteps> piece;
  IncomingWeight weight;
  uint32_t tokens, ids, most_tokens, duplicates;  // as RoutingBitmap has them

  // All that does not need the epoch: where piece `number` will lie; an own row is loaded.
  __device__ __forceinline__ void compute_addr(const DispatchRole& role, const RoutingBitmap& bitmap, int number) {
    const LlDispatchParams& p = role.p;
    unit = ReceiveUnit::of(role, number);
    slot = ptx::opaque(unit.source * p.shape.max_tokens + unit.token);
    const int k = min(role.lane, p.shape.topk - 1);
    const bool is_byte = p.offsets.ids.bits == 8;
    const int word = RoutingBitmapShape::kIdsAt + slot * p.offsets.ids.words() + (is_byte ? k >> 2 : k >> 1);
    tokens_at = ptx::opaque(bitmap.address + (bitmap.shape.tokens_at + unit.source) * 4);
    id_at = ptx::opaque(bitmap.address + word * 4);
    id_shift = is_byte ? (k & 3) * 8 : (k & 1) * 16;
    id_mask = ptx::opaque(p.offsets.ids.none());
    if constexpr (kAimsAhead) compute_place_addrs(role, bitmap);
    is_own = unit.source == role.peers.rank && sends(p.phase);
    is_by_link = role.comes_by_link(unit.source);
    has_numbers = ptx::opaque(unit.piece == role.geometry.numbers_piece ? 1 : 0) != 0;
    staged = ptx::opaque(role.peers.local<char>(p.offsets.row<kMasksRanks>(0, unit.source, unit.token)) +
                         lane_offset<kSteps>(unit.piece, role.lane));
    weight = {
        ptx::opaque(role.peers.local<uint64_t>(p.offsets.weight<kMasksRanks>(0, unit.source, unit.token, role.lane))),
        0};
    if (is_own) load_raw(p, role.geometry, unit.token, unit.piece, role.lane, raw);
  }
  __device__ __forceinline__ void compute_place_addrs(const DispatchRole& role, const RoutingBitmap& bitmap) {
    before = slots_before<kLayout>(role.p, bitmap, unit.source, slot);
    before.last = ptx::opaque(before.last);
    writer.compute_addr(role.p, role.geometry, unit.piece, role.lane);
  }
  __device__ __forceinline__ void prefetch(const DispatchRole& role, const WarpContext& op) {
    const LlOffsets& offsets = role.p.offsets;
    const int bank = op.bank;
    staged += bank * static_cast<int64_t>(offsets.row_bank_bytes);
    weight.word += bank * static_cast<int64_t>(offsets.tagged_bank_bytes / sizeof(uint64_t));
    if (needs_weight(role)) weight.seen = ptx::ld_relaxed_sys(weight.word);
    if (has_slot()) load_wire(staged, role.geometry.row, unit.piece, piece, role.lane);
  }
  // What the routing says of it, once that is known.
  __device__ __forceinline__ void poll(const RoutingBitmap& bitmap) {
    ptx::ld_shared(tokens_at, tokens);
    ptx::ld_shared(id_at, ids);
    ptx::ld_shared(bitmap.address + RoutingBitmap::kMostTokens * 4, most_tokens);
    ptx::ld_shared(bitmap.address + RoutingBitmap::kDuplicates * 4, duplicates);
  }
  __device__ __forceinline__ bool exists() const { return unit.token < static_cast<int>(tokens); }
  __device__ __forceinline__ ChoicePlacement<kLayout> find_place(const DispatchRole& role,
                                                                 const RoutingBitmap& bitmap) {
    if constexpr (!kAimsAhead) {
      poll(bitmap);
      compute_place_addrs(role, bitmap);
    }
    const uint32_t id = ids >> id_shift & id_mask;
    const uint32_t expert = exists() && role.lane < role.p.shape.topk ? id : ~0u;
    return ChoicePlacement<kLayout>::of(role.p, bitmap, unit.source, slot, before, duplicates != 0, expert);
  }

  __device__ __forceinline__ bool has_slot() const { return !is_own && !is_by_link; }
  __device__ __forceinline__ bool needs_weight(const DispatchRole& role) const {
    return has_numbers && role.lane < role.p.shape.topk;
  }
  // Loads again what had not come, before it is used.
  __device__ __forceinline__ void prefetch_again(const DispatchRole& role, const WarpContext& op) {
    if (has_numbers) {  // a branch of the whole warp
      if (needs_weight(role) && !is_tagged(weight.seen, op.tag)) weight.seen = ptx::ld_relaxed_sys(weight.word);
    }
    if (has_slot() && !has_arrived(piece)) load_wire(staged, role.geometry.row, unit.piece, piece, role.lane);
  }

  // The row has arrived, and its slot is empty again; of a rank that is masked meanwhile there are zeros. False: the
  // wait was given up.
  template <DType kType>
  __device__ __forceinline__ bool consume(const DispatchRole& role, const WarpContext& op,
                                          const RoutingBitmap& bitmap) {
    if constexpr (kCrossesDomains) {
      if (is_by_link) {
        if (!load_from_link(role, op, bitmap, unit, piece)) return false;
        decode<kEncoding, kSteps>(piece);
        return true;
      }
    }
    if (is_own) {
      encode<kEncoding, kType, kSteps>(role.p, raw, unit.piece, piece, role.lane);
    } else {
      WaitBudget budget;
      while (!has_arrived(piece)) {
        if (has_bug(Bug::kTornRows, op.context.kind) && __all_sync(~0u, has_arrived(piece.vector[0]))) break;
        if (__any_sync(~0u, budget.is_spent(op, Awaited::kRows, unit.source, unit.token, unit.piece))) {
          if (!kMasksRanks || __any_sync(~0u, op.context.has_failed())) return false;
          piece = {};
          return true;
        }
        load_wire(staged, role.geometry.row, unit.piece, piece, role.lane);
      }
      testing_point(Point::kBeforeReset, op, unit.source * role.p.shape.max_tokens + unit.token);
      if (!has_bug(Bug::kSkippedReset, op.context.kind) || unit.token != 0) {
        reset_wire<kSteps, kSidesOf<kEncoding, kSteps>>(staged, role.geometry.row, unit.piece, role.lane);
      }
    }
    decode<kEncoding, kSteps>(piece);
    return true;
  }
};

// Stores a piece into the rows of the lanes that have one.
template <Encoding kEncoding, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ void store_piece(const DispatchRole& role, const Incoming<kEncoding, kSteps, kLayout>& in,
                                            int32_t row, uint32_t expert) {
  constexpr int kBatchSize = kEncoding == Encoding::kFloat && has_expert_rows(kLayout) ? 2 : 1;
  unsigned targets = __ballot_sync(~0u, row >= 0);
  if constexpr (!has_expert_rows(kLayout)) targets &= -targets;  // one row for all choices
#pragma unroll 1
  while (targets != 0) {
    int32_t rows[kBatchSize];
    uint32_t experts[kBatchSize];
    bool is_row[kBatchSize];
#pragma unroll
    for (int q = 0; q < kBatchSize; q++, targets &= targets - 1) {
      const int k = __ffs(static_cast<int>(targets)) - 1;
      rows[q] = __shfl_sync(~0u, row, k);
      experts[q] = __shfl_sync(~0u, expert, k);
      is_row[q] = targets != 0;
    }
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) {
      if (q == 0 || is_row[q]) in.writer.store(role.p, role.geometry.out_scales, rows[q], experts[q], in.piece);
    }
  }
}

// Piece `number`, which `in` has loaded, to its place. False: it was the warp's last, or a wait was given up.
template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ bool place_piece(const DispatchRole& role, const WarpContext& op,
                                            const RoutingBitmap& bitmap, Incoming<kEncoding, kSteps, kLayout>& in,
                                            const ChoicePlacement<kLayout>& place, int number) {
  constexpr bool kAnnounces = kAnnouncesRows && has_expert_rows(kLayout);
  const LlDispatchParams& p = role.p;
  const ReceiveUnit unit = in.unit;
  const bool exists = in.exists();
  if (!exists && number >= role.geometry.own_units && unit.token >= static_cast<int>(in.most_tokens)) return false;
  const int32_t row = place.row(p, bitmap);
  if (exists && in.has_numbers) {
    store_row_info<has_expert_rows(kLayout)>(role, op, unit.source, unit.token, place.wanted, place.expert, row,
                                             in.weight);
  }
  if (!__any_sync(~0u, place.wanted)) return true;
  if (!in.template consume<kType>(role, op, bitmap)) {
    if constexpr (kAnnounces) tell_failure(p.arrivals);
    return false;
  }
  store_piece(role, in, row, place.expert);
  if constexpr (kAnnounces) count_rows_arrived(p, row);
  if (in.is_own) stamp(Stamp::kOwnDone, role.peers.rank);
  return true;
}

// ---- Table of contents of a receiver

// The buffer has failed: nothing was received. The block that would write the info tensor clears it: other blocks may
// not have seen the failure.
template <bool kExpertRows>
static __device__ __noinline__ void store_nothing(const DispatchRole role) {
  const LlDispatchParams& p = role.p;
  if (!receives(p.phase)) return;
  const int64_t thread = role.at.block * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(role.at.num_blocks) * blockDim.x;
  for (int64_t row = thread; row < p.output.rows(); row += threads) clear_entry(p, kExpertRows, row);
  if (role.at.block != role.at.num_blocks - 1) return;
  if constexpr (kAnnouncesRows) tell_failure(p.arrivals);
  const int ranges = p.layout_range != nullptr ? p.output.bins() * p.shape.num_ranks : 0;
  for (int i = threadIdx.x; i < p.output.info_size(); i += blockDim.x) p.info[i] = 0;
  for (int i = threadIdx.x; i < p.shape.num_ranks; i += blockDim.x) p.handle.tokens[i] = 0;
  for (int i = threadIdx.x; i < ranges; i += blockDim.x) p.layout_range[i] = 0;
}

// Of all sources but those that another block has left out.
template <bool kExpertRows>
static __device__ __noinline__ void rebuild_bitmap(const DispatchRole role, const WarpContext op,
                                                   const RoutingBitmap bitmap) {
  const int thread = role.receiving_thread(), threads = role.receiving_threads();
  bitmap.clear(thread, threads);
  ptx::named_barrier(1, threads);
  build_bitmap<kExpertRows, true>(role.p, role.peers, op, bitmap, role.geometry.by_max_tokens, thread, threads);
  ptx::named_barrier(1, threads);
}

// Barriers of a block, beside 1 and those of open_op(). Each is waited for at one place in the code: synccheck wants it
// so.
constexpr int kDutiesBarrier = 4, kPiecesBarrier = 5, kRollBarrier = 6, kRollTestingBarrier = 7;
constexpr int kLoneInfoBins = 64;  // up to so many, one warp writes the info tensor; of more, each has 32

// `in`: the warp's first piece, if it has any. `has_addr`: its addresses are computed already.
template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ void receive(const DispatchRole& role, const WarpContext& op, const RoutingBitmap& bitmap,
                                        Incoming<kEncoding, kSteps, kLayout>& in, bool has_addr) {
  constexpr bool kIsPacked = kLayout == OutputLayout::kPacked, kShares = kCanShare<kEncoding, kSteps>;
  const LlDispatchParams& p = role.p;
  const int threads = ptx::opaque(role.receiving_threads());
  testing_point(Point::kBeforeReceive, op);
  MaskConsensus roll;
  if (kMasksRanks && role.receiving_thread() < 32) roll.open(op);
  if (kMasksRanks) __syncwarp();   // the leader warp's first lane comes from elsewhere
  ptx::named_barrier(1, threads);  // clear() is over
  // The last warps have the fewest rows to move: they clear gaps, and those of the last block write the info tensor.
  const int from_last = role.plan.receivers() - 1 - role.receiver(), bins = p.output.bins();
  const int last_in_block = role.plan.receiver_warp0 + role.plan.receiver_warps - 1 - role.warp;
  const int info_warps = bins <= kLoneInfoBins ? 1 : min(ceil_div(bins, 32), role.plan.receiver_warps);
  const bool is_last_block = role.at.block == role.at.num_blocks - 1;
  const bool stores_info = is_last_block && last_in_block < info_warps;
  const bool stores_rest = is_last_block && last_in_block == min(info_warps, role.plan.receiver_warps - 1);
  int number = ptx::opaque(role.unit_of<kShares>(0, 0));
  const StartFinder starts(bitmap, role.geometry.by_alignment, kIsPacked && last_in_block == 0);
  const bool has_duties =
      ptx::opaque(stores_info || stores_rest || starts.finds || from_last < role.geometry.gap_warps);
  build_bitmap<has_expert_rows(kLayout)>(p, role.peers, op, bitmap, role.geometry.by_max_tokens,
                                         role.receiving_thread(), threads);
  const bool has_pieces = ptx::opaque(number < role.geometry.receive_units ? 1 : 0) != 0;
  if (has_pieces) {
    if (!has_addr) in.compute_addr(role, bitmap, number);
    in.prefetch(role, op);
  }
  if (kMasksRanks) __syncwarp();
  ptx::named_barrier(1, threads);  // the routing is known
  if constexpr (kMasksRanks) {
    if (role.receiving_thread() < 32) roll.settle(op);
    __syncwarp();
    ptx::named_barrier(kRollBarrier, threads);
    testing_barrier(kRollTestingBarrier,
                    threads);  // racecheck takes the leader warp for one that did not come to the other
    if (op.context.listens_again != 0) {
      rebuild_bitmap<has_expert_rows(kLayout)>(role, op, bitmap);
    }
  }
  bool awaits_starts = false;
  if constexpr (kIsPacked) {
    // Warps with duties wait for the starts before these, the others once they have counted rows of the same expert: a
    // barrier each. The rest only arrive at it.
    if (starts.finds) testing_point(Point::kBeforeReceive, op, 1);
    starts.find(p, bitmap);
    awaits_starts = has_pieces && !has_duties;
    if (!awaits_starts) ptx::named_barrier_arrive(kPiecesBarrier, threads);
    if (!has_duties) ptx::named_barrier_arrive(kDutiesBarrier, threads);
  }
  if (has_duties) {
    if constexpr (kIsPacked) ptx::named_barrier(kDutiesBarrier, threads);
    const auto row_units = static_cast<int>(role.geometry.by_receive_pieces.divisor);
    if (stores_info) store_info<kLayout>(p, op, bitmap, last_in_block, info_warps, row_units);
    if (stores_rest) store_rest_of_info<kLayout>(p, bitmap, op.tag);
    clear_gaps<kLayout>(p, bitmap, from_last, role.plan.receivers());
  }
  stamp(Stamp::kRoutingKnown, role.peers.rank);
  if (!has_pieces) return;
  if constexpr (in.kAimsAhead) in.poll(bitmap);
  in.prefetch_again(role, op);
#pragma unroll 1
  for (int round = 1;; round++) {
    const ChoicePlacement<kLayout> place = in.find_place(role, bitmap);
    if (awaits_starts) ptx::named_barrier(kPiecesBarrier, threads);
    awaits_starts = false;
    if (!place_piece<kEncoding, kType, kSteps, kLayout>(role, op, bitmap, in, place, number)) return;
    number = role.unit_of<kShares>(round, number);
    if (number >= role.geometry.receive_units) return;
    in.compute_addr(role, bitmap, number);
    if constexpr (in.kAimsAhead) in.poll(bitmap);
    in.prefetch(role, op);
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
