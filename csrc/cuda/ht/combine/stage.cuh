// The first part of combine in high throughput: what a rank must do before others can read its rows. Op message,
// tables, weights of the home rank, and the rows that are added up or copied to the staging rows.
#pragma once

#include "cuda/device/row_stream.cuh"
#include "cuda/device/scans.cuh"
#include "cuda/ht/common/geometry.h"
#include "cuda/ht/common/messages.cuh"
#include "cuda/ht/common/signals.cuh"
#include "cuda/ht/common/tables.cuh"
#include "cuda/ht/common/work.cuh"
#include "cuda/protocol/ids.cuh"

namespace ep {
inline namespace EP_KERNELS {

using CopyRing = CopyRingOf<HtCombineGeometry::kRingItems, HtCombineGeometry::kPieceSteps>;
template <class Work>
using RowStream = RowStreamOf<CopyRing, Work>;

struct CombineTables {
  Offset* offsets;  // [R] of rows that are read in place
  Flows flows;
  // Of segments, (chunk, home) in that order:
  int* segment_start;  // [chunks * R + 1] slots staged before
  int* segment_slot;   // [chunks * R] the first slot, less segment_start
  uint32_t* ready;     // [R, announced] not 0: a warp of the block has seen that the chunk may be read
  int announced;       // chunks of each rank

  __device__ static CombineTables of(char* shared, int ranks, int chunks, int announced) {
    SharedTables tables{shared};
    CombineTables t;
    t.offsets = tables.take<Offset>(ranks);
    t.flows = Flows::of(tables, ranks);
    t.segment_start = tables.take<int>(chunks * ranks + 1);
    t.segment_slot = tables.take<int>(chunks * ranks);
    t.ready = tables.take<uint32_t>(announced * ranks);
    t.announced = announced;
    return t;
  }
  // Acquire and release, within the block: one look at a signal is enough.
  __device__ __forceinline__ bool knows_ready(int rank, int chunk) const {
    return !testing_without_flags() && ptx::ld_acquire_shared(ready + rank * announced + chunk) != 0;
  }
  __device__ __forceinline__ void note_ready(int rank, int chunk) const {
    if (!testing_without_flags()) ptx::st_release_shared(ready + rank * announced + chunk, 1);
  }
};

struct HtCombineRole : HtBlock {
  const HtCombineParams& p;
  const HtCombineGeometry& geometry;
  const HtPlan& plan;
  const LsaPeers& peers;
  const OpContext& op;
  CombineTables tables;
  HtRailPart part;

  __device__ int num_ranks() const { return p.shape.num_ranks; }
  __device__ char* staged(int rank, int32_t slot, int part) const {
    return peers.at<char>(rank, p.offsets.staged_row(slot) + p.offsets.row.offset[part]);
  }
  // Whether this rank reads a row of `rank` where it lies: its own rows wherever they are, others' in their arena.
  __device__ bool reads_in_place(int rank) const {
    return rank == peers.rank ? p.can_read_in_place() : tables.offsets[rank] != kNoOffset;
  }
  // Who reads this rank's rows of tokens of `home`: between domains its rail peer here.
  __device__ int reader_of(int home) const { return kCrossesDomains ? peers.first + home % peers.size : home; }
  // The number that the flow of these rows has there.
  __device__ int flow_to(int home) const {
    return kCrossesDomains ? home - home % peers.size + peers.rank - peers.first : op.rank;
  }
  // Whether it reads them where they lie.
  __device__ bool is_read_in_place(int home) const {
    return reader_of(home) == peers.rank ? p.can_read_in_place() : p.reads_in_place();
  }
  __device__ int owner_elsewhere(int) const { return -1; }  // the domains add up their own rows
  __device__ int values_part() const { return p.offsets.row.num_parts - 1; }
  __device__ char* ring(char* rings) const { return rings + warp * HtCombineGeometry::kRingBytes; }
  // Lanes' worths of a row from this lane's part of a piece on.
  __device__ int rest(int piece) const {
    return geometry.row_lanes - piece * HtCombineGeometry::kPieceSteps * 32 - lane;
  }
};

// Words of combine's op message: where its rows may be read in place, low word first; kNoOffset: staged.
constexpr int kCombineRowsOffset = HtMessage::kOffsets;
constexpr int kCombineMessageWords = kCombineRowsOffset + 2;
static_assert(kCombineMessageWords <= HtMessage::kCounts);

__device__ __forceinline__ uint32_t combine_word_of(const HtCombineParams& p, int index) {
  if (index < kCombineRowsOffset) return 0;
  const Offset offset = p.reads_in_place() ? p.rows_offset : kNoOffset;
  return static_cast<uint32_t>(index == kCombineRowsOffset ? offset : offset >> 32);
}

__device__ __forceinline__ void fill_tables(const HtCombineRole& role) {
  const HtCombineParams& p = role.p;
  const CombineTables& t = role.tables;
  const int ranks = role.num_ranks(), chunks = role.plan.chunks;
  const auto count_of = [&](int source, int receiver) { return count_in_handle(p, source, receiver); };
#pragma unroll 1
  for (int r = role.warp; r < ranks; r += role.threads() / 32) {
    t.flows.fill(ranks, role.peers, r, count_of);
    if (role.lane == 0) t.offsets[r] = await_message_offset(role.op, p.offsets, role.peers, r, kCombineRowsOffset);
  }
#pragma unroll 1
  for (int i = role.thread(); i < t.announced * ranks; i += role.threads()) t.ready[i] = 0;
  __syncthreads();
  if (!role.geometry.has_staging || role.warp != 0) return;
  const auto size_of_segment = [&](int i) {
    const int home = i % ranks;
    const bool is_staged = p.has_values || !role.is_read_in_place(home);
    return is_staged ? chunk_size(i / ranks, t.flows.from[home], chunks) : 0;
  };
  const int end = exclusive_sums(chunks * ranks, t.segment_start, size_of_segment);
  if (role.lane == 0) t.segment_start[chunks * ranks] = end;
#pragma unroll 1
  for (int i = role.lane; i < chunks * ranks; i += 32) {
    const int home = i % ranks, first = t.flows.from_first[home] + chunk_begin(i / ranks, t.flows.from[home], chunks);
    t.segment_slot[i] = first - t.segment_start[i];
  }
}

// ---- Weights of the home rank: one block sends them to their slots, with marks of choices that are skipped

__device__ __forceinline__ void send_weights(const HtCombineRole& role) {
  const HtCombineParams& p = role.p;
  const HtSlotFormat& format = p.offsets.slot;
  const int topk = p.shape.topk;
#pragma unroll 1
  for (int64_t i = role.thread(); i < static_cast<int64_t>(p.num_tokens) * topk; i += role.threads()) {
    const int id = p.handle.own.ids[i], slot = p.handle.own.slots[i], k = static_cast<int>(i % topk);
    const int rank = owner_of(role, id, slot);
    if (rank < 0) continue;
    const bool is_skipped = p.home_topk_idx != nullptr && !p.shape.valid(load_id(p.home_topk_idx, p.is_idx64, i));
    auto* words = role.peers.at<uint32_t>(rank, p.offsets.slot_words(slot));
    ptx::st_relaxed_sys(words + format.place(k), static_cast<uint32_t>(is_skipped ? kNoRow : 0));
    ptx::st_relaxed_sys(words + format.weight(k), __float_as_uint(p.home_weights[i]));
  }
  __syncthreads();
  const NearRanks near = NearRanks::of(role.peers, role.num_ranks());
  for (int peer = near.first + role.thread(); peer < near.end(); peer += role.threads()) {
    send_signal(role.op, p.offsets, role.peers, peer, HtSignal::kCombineWeights, 0);
  }
}

__device__ __forceinline__ bool await_all(const HtCombineRole& role, HtSignal signal, Awaited awaited) {
  bool ok = true;
#pragma unroll 1
  for (int source = role.lane; source < role.num_ranks(); source += 32) {
    // Ranks of other domains read none of this one's rows.
    if (kCrossesDomains && signal == HtSignal::kCombineDone && role.reader_of(source) != source) continue;
    ok = await_signal(role.op, role.p.offsets, role.peers, signal, source, 0, awaited) && ok;
  }
  ok = __all_sync(~0u, ok);
  __syncwarp();
  return ok;
}

// ---- Rows for other ranks to read

__device__ __forceinline__ void stage_values(const HtCombineRole& role, int32_t slot, int32_t row) {
  const HtCombineParams& p = role.p;
  if (role.lane >= p.shape.topk) return;
  const bool expert_rows = has_expert_rows(p.output.layout);
  int32_t place = row;
  if (expert_rows) place = slot < p.handle.num_slots ? p.handle.slot(slot)[p.offsets.slot.place(role.lane)] : kNoRow;
  float value = 0.0f;
  if (place >= 0 && place < p.output.rows()) {
    value = p.values[expert_rows ? place : static_cast<int64_t>(place) * p.shape.topk + role.lane];
  }
  reinterpret_cast<float*>(role.staged(role.peers.rank, slot, role.values_part()))[role.lane] = value;
}

// A unit of staging, in the order (chunk, home, token), so that all homes can begin. Loaded ahead.
struct StagedSlot {
  int unit, segment = 0;
  int32_t slot = 0;
  // Lane k holds choice k; in rank layouts lane 0 holds the row.
  int32_t row = kNoRow, mark = 0;
  float weight = 1.0f;

  __device__ __forceinline__ static StagedSlot load(const HtCombineRole& role, int unit) {
    StagedSlot found;
    found.unit = unit;
    const int segments = role.plan.chunks * role.num_ranks();
    if (unit >= role.tables.segment_start[segments]) return found;
    found.segment = segment_of(role.tables.segment_start, segments, unit);
    found.slot = role.tables.segment_slot[found.segment] + unit;
    found.load_terms(role);
    return found;
  }
  __device__ __forceinline__ void load_terms(const HtCombineRole& role) {
    const HtCombineParams& p = role.p;
    if (!has_expert_rows(p.output.layout)) {
      const int home = segment % role.num_ranks(), first = role.tables.flows.from_first[home];
      if (role.lane == 0) row = p.output.row(home, first, slot - first);
      return;
    }
    if (role.lane >= p.shape.topk || slot >= p.handle.num_slots) return;
    const HtSlotFormat& format = p.offsets.slot;
    const int32_t* kept = p.handle.slot(slot);
    row = kept[format.place(role.lane)];
    if (p.options.weighting == Weighting::kDispatch) weight = __int_as_float(kept[format.weight(role.lane)]);
    if (p.options.weighting != Weighting::kHome) return;
    // For choices that are not on this rank these words are arbitrary.
    const auto* given = role.peers.local<uint32_t>(p.offsets.slot_words(slot));
    mark = static_cast<int32_t>(ptx::ld_relaxed_sys(given + format.place(role.lane)));
    weight = __uint_as_float(ptx::ld_relaxed_sys(given + format.weight(role.lane)));
  }
  // Of this lane; kNoRow: none that counts.
  __device__ __forceinline__ int32_t counted_row(const OutputShape& output) const {
    // Past the end: of a dispatch that was given up, or of a handle that was changed.
    return mark == kNoRow || row >= output.rows() ? kNoRow : row;
  }
};

// A token's rows here, added in the order of k, each product and sum rounded by itself; in rank layouts its one row.
// kSignalled: a kernel on another stream still writes them (RowSignals). No row is loaded before its signal: the lane
// that saw the signal acquires, and the warp's barrier hands that on to the lanes that load the row.
template <DType kIn, DType kWire, int kLaneCount, bool kSignalled>
struct StagedRows {
  static constexpr int kCount = kLaneCount, kSteps = CopyRing::kSteps;

  const HtCombineRole& role;
  Tickets tickets;
  StagedSlot next;
  PieceRange pieces;       // of every unit
  OfUnits<unsigned> rows;  // of the token's choices
  OfUnits<int> segments;
  OfUnits<int32_t> slots;  // kNoSlot: nothing is stored
  int32_t prefetched_row = kNoRow;
  float prefetched_weight = 1.0f, weight = 1.0f;  // of the unit turned to, of the one that is added
  uint32_t before = 0;                            // it was counted: the count before, lane 0

  static constexpr int32_t kNoSlot = -1;

  __device__ __forceinline__ explicit StagedRows(const HtCombineRole& a_role)
      : role(a_role), pieces{0, role.geometry.pieces} {
    tickets.prefetch(counters_of(role.op).staged);
    prefetch_next();
  }
  __device__ __forceinline__ void prefetch_next() {
    const int unit = tickets.next();
    tickets.prefetch(counters_of(role.op).staged);
    next = StagedSlot::load(role, unit);
  }
  __device__ __forceinline__ bool is_at_end() const {
    return next.unit >= role.tables.segment_start[role.plan.chunks * role.num_ranks()];
  }
  // Acquire. `seen`: of this lane's row where that may not be read yet, which is returned; else kNoRow.
  __device__ __forceinline__ int32_t row_under_way(uint32_t& seen) const {
    const RowSignals& signals = role.p.signals;
    const int32_t row = next.counted_row(role.p.output);
    if (row < 0 || signals.counters == nullptr) return kNoRow;
    const uint32_t* counter = signals.counter_of(row);
    seen = ptx::ld_relaxed_gpu(counter);  // each acquire empties the SM's L1
    if (!signals.is_reached(seen)) return row;
    ptx::ld_acquire_gpu(counter);
    return kNoRow;
  }
  __device__ __forceinline__ bool is_signalled() const {
    uint32_t seen = 0;
    const bool all = __all_sync(~0u, row_under_way(seen) == kNoRow) != 0;
    __syncwarp();
    return all;
  }
  __device__ __forceinline__ bool await() const {
    if constexpr (!kSignalled) return false;  // rows are there when the kernel begins
    if (is_at_end()) return false;
    WaitBudget budget;
    while (true) {
      uint32_t seen = 0;
      const int32_t row = row_under_way(seen);
      const unsigned late = __ballot_sync(~0u, row != kNoRow);
      __syncwarp();
      if (late == 0) return true;
      if (!budget.is_due()) continue;
      const int lane = __ffs(static_cast<int>(late)) - 1, awaited = __shfl_sync(~0u, row, lane);
      const RowSignals& signals = role.p.signals;
      const bool is_over = budget.poll(role.op, Awaited::kRowSignal, signals.expert_of(awaited),
                                       signals.expected(awaited), __shfl_sync(~0u, seen, lane));
      __syncwarp();
      if (__any_sync(~0u, is_over)) return false;
    }
  }
  __device__ __forceinline__ bool turn(unsigned unit) {
    const HtCombineParams& p = role.p;
    if (is_at_end()) return false;
    if (kSignalled && !is_signalled()) return false;
    testing_point(Point::kBetweenRows, role.op, next.unit);
    const bool is_copied = p.has_rows() && !role.is_read_in_place(next.segment % role.num_ranks());
    prefetched_weight = next.weight;
    prefetched_row = next.counted_row(p.output);
    const unsigned found = is_copied ? __ballot_sync(~0u, prefetched_row >= 0) : 0;
    rows.put(unit, found);
    segments.put(unit, next.segment);
    slots.put(unit, is_copied && (found != 0 || has_expert_rows(p.output.layout)) ? next.slot : kNoSlot);
    if (p.has_values) stage_values(role, next.slot, __shfl_sync(~0u, next.row, 0));
    prefetch_next();
    return true;
  }
  __device__ __forceinline__ void prefetch(CopyRing& ring, unsigned, int row, int piece) const {
    constexpr int kLaneBytes = Numbers<kIn, kCount>::kLaneBytes;
    const int64_t place = __shfl_sync(~0u, prefetched_row, row);
    ring.prefetch<kLaneBytes>(static_cast<const char*>(role.p.rows) + place * (role.p.hidden * size_of(kIn)) +
                                  (piece * kSteps * 32 + role.lane) * kLaneBytes,
                              role.rest(piece));
  }
  __device__ __forceinline__ void take_over() { weight = prefetched_weight; }
  __device__ __forceinline__ void begin(unsigned unit, int, float (&sum)[kSteps][kCount]) const {
    fill(sum, rows.get(unit) == 0 ? 0.0f : kNothingYet);
  }
  __device__ __forceinline__ void add(unsigned, int row, ptx::SharedAddress item, float (&sum)[kSteps][kCount]) const {
    const float factor = __shfl_sync(~0u, weight, row);
#pragma unroll
    for (int s = 0; s < kSteps; s++) ringed<kIn, kCount>(item, s).add_product_to(sum[s], factor);
  }
  __device__ __forceinline__ void store(unsigned unit, int piece, const float (&sum)[kSteps][kCount]) const {
    if (!kSignalled && piece == 0 && unit > 0) look_at_count(unit - 1);
    const int32_t slot = slots.get(unit);
    if (slot == kNoSlot) return;
    store_sum<kWire>(role.staged(role.peers.rank, slot, 0), role.p.hidden, piece, role.rest(piece), sum);
  }
  __device__ __forceinline__ void finish(unsigned unit) {
    const int segment = segments.get(unit);
    __syncwarp();
    if (role.lane == 0) {
      __threadfence();
      before = ptx::atom_count_relaxed_gpu(&counters_of(role.op).ready[segment]);
    }
    if constexpr (kSignalled) look_at_count(unit);  // rows of the next unit may be long in coming
  }
  // The warp that has staged the last row of a segment signals it. The counter's answer is used when it has long been
  // there.
  __device__ __forceinline__ void look_at_count(unsigned unit) const {
    const int segment = segments.get(unit);
    if (role.lane == 0) {
      const int* start = role.tables.segment_start + segment;
      const auto size = static_cast<uint32_t>(start[1] - start[0]);
      const bool is_last = before + 1 == (has_bug(Bug::kEarlyRows, Kind::kCombine) ? 1u : size);
      const int home = segment % role.num_ranks();
      if (is_last && !has_bug(Bug::kUnannouncedRows, Kind::kCombine)) {
        send_signal_of(role.op, role.p.offsets, role.peers, role.reader_of(home), HtSignal::kCombineReady,
                       role.flow_to(home), segment / role.num_ranks());
      }
    }
    __syncwarp();
  }
};

template <DType kIn, DType kWire, int kCount, bool kSignalled>
__device__ __forceinline__ void stage_rows(const HtCombineRole& role, char* rings) {
  const bool is_home_weighted = role.p.options.weighting == Weighting::kHome && role.p.has_rows();
  if (is_home_weighted && !await_all(role, HtSignal::kCombineWeights, Awaited::kWeights)) return;
  using Rows = StagedRows<kIn, kWire, kCount, kSignalled>;
  Rows rows(role);
  RowStream<Rows> stream{rows, CopyRing(role.ring(rings))};
  stream.run();
  if (!kSignalled && stream.num_begun > 0) rows.look_at_count(stream.num_begun - 1);
}

}  // namespace EP_KERNELS
}  // namespace ep
