// Combine's first half in high throughput: what a rank must do before others can read its rows. Call, tables, weights
// of the home rank, and the rows that are added up or copied to the staging rows.
#pragma once

#include "cuda/ht_call.cuh"
#include "cuda/numbers.cuh"

namespace ep {

struct CombineTables {
  Offset* offsets;  // [R] of rows that are read in place
  Flows flows;
  int* chunk_start;  // [chunks * R + 1] slots staged before (chunk, home)

  __device__ static CombineTables of(char* shared, int ranks) {
    SharedTables tables{shared};
    CombineTables t;
    t.offsets = tables.take<Offset>(ranks);
    t.flows = Flows::of(tables, ranks);
    t.chunk_start = tables.take<int>(kHtChunks * ranks + 1);
    return t;
  }
};

struct HtCombineRole : HtBlock {
  const HtCombineParams& p;
  const HtCombineGeometry& geometry;
  const HtPlan& plan;
  const LsaPeers& peers;
  const CallContext& call;
  CombineTables tables;

  __device__ int num_ranks() const { return p.shape.num_ranks; }
  __device__ char* staged(int rank, int32_t slot, int part) const {
    return peers.at<char>(rank, p.layout.staged_row(slot) + p.layout.row.offset[part]);
  }
  __device__ int values_part() const { return p.layout.row.num_parts - 1; }
  // Of this lane in a step of a piece; the row's last one past its end.
  template <int kCount>
  __device__ int lane_index(int piece, int step) const {
    return min((piece * HtCombineGeometry::kPieceSteps + step) * 32 + lane, p.hidden / kCount - 1);
  }
};

// Words of combine's call message: where its rows may be read in place, low word first; kNoOffset: staged.
constexpr int kCombineRowsOffset = HtCall::kOffsets;
constexpr int kCombineCallWords = kCombineRowsOffset + 2;

__device__ __forceinline__ uint32_t combine_word_of(const HtCombineParams& p, int index) {
  if (index < kCombineRowsOffset) return 0;
  const Offset offset = p.reads_in_place() ? p.rows_offset : kNoOffset;
  return static_cast<uint32_t>(index == kCombineRowsOffset ? offset : offset >> 32);
}

__device__ __forceinline__ void fill_tables(const HtCombineRole& role) {
  const HtCombineParams& p = role.p;
  const CombineTables& t = role.tables;
  const int ranks = role.num_ranks(), rank = role.peers.rank, chunks = role.plan.chunks;
#pragma unroll 1
  for (int r = role.warp; r < ranks; r += role.threads() / 32) {
    t.flows.fill(p.handle.counts, ranks, rank, r);
    if (role.lane == 0) t.offsets[r] = await_call_offset(role.call, p.layout, role.peers, r, kCombineRowsOffset);
  }
  __syncthreads();
  if (!role.geometry.has_staging || role.warp != 0) return;
  const auto size_of_segment = [&](int i) { return chunk_size(i / ranks, t.flows.from[i % ranks], chunks); };
  const int end = exclusive_sums(chunks * ranks, t.chunk_start, size_of_segment);
  if (role.lane == 0) t.chunk_start[chunks * ranks] = end;
}

// ---- Weights of the home rank: one block sends them to their slots, beside marks of choices that do not count

__device__ __forceinline__ void send_weights(const HtCombineRole& role) {
  const HtCombineParams& p = role.p;
  const HtSlotFormat& format = p.layout.slot;
  const int topk = p.shape.topk;
#pragma unroll 1
  for (int64_t i = role.thread(); i < static_cast<int64_t>(p.num_tokens) * topk; i += role.threads()) {
    const int id = p.handle.own.ids[i], k = static_cast<int>(i % topk);
    if (id < 0) continue;
    const bool is_skipped = p.home_topk_idx != nullptr && !p.shape.valid(load_id(p.home_topk_idx, p.is_idx64, i));
    auto* words =
        role.peers.at<uint32_t>(role.geometry.by_local_experts.divide(id), p.layout.slot_words(p.handle.own.slots[i]));
    ptx::st_relaxed_sys(words + format.place(k), static_cast<uint32_t>(is_skipped ? kNoRow : 0));
    ptx::st_relaxed_sys(words + format.weight(k), __float_as_uint(p.home_weights[i]));
  }
  __syncthreads();
  for (int peer = role.thread(); peer < role.num_ranks(); peer += role.threads()) {
    send_signal(role.call, p.layout, role.peers, peer, HtSignal::kCombineWeights, 0);
  }
}

__device__ __forceinline__ bool await_all(const HtCombineRole& role, HtSignal signal, Phase phase) {
  bool ok = true;
#pragma unroll 1
  for (int source = role.lane; source < role.num_ranks(); source += 32) {
    ok = await_signal(role.call, role.p.layout, role.peers, signal, source, 0, phase) && ok;
  }
  ok = __all_sync(~0u, ok);
  __syncwarp();
  return ok;
}

// ---- Rows for others to read

// The rows of a slot's token here: lane k holds choice k.
struct StagedTerms {
  int32_t row = kNoRow;
  float weight = 1.0f;

  __device__ __forceinline__ static StagedTerms load(const HtCombineRole& role, int32_t slot) {
    const HtCombineParams& p = role.p;
    const HtSlotFormat& format = p.layout.slot;
    StagedTerms terms;
    if (role.lane >= p.shape.topk) return terms;
    const int32_t* kept = p.handle.slot(slot);
    terms.row = kept[format.place(role.lane)];
    if (terms.row >= p.output.rows()) terms.row = kNoRow;  // of a dispatch that was given up
    if (p.weighting == Weighting::kDispatch) terms.weight = __int_as_float(kept[format.weight(role.lane)]);
    if (p.weighting != Weighting::kHome || terms.row < 0) return terms;
    const auto* given = role.peers.local<uint32_t>(p.layout.slot_words(slot));
    if (static_cast<int32_t>(ptx::ld_relaxed_sys(given + format.place(role.lane))) == kNoRow) terms.row = kNoRow;
    terms.weight = __uint_as_float(ptx::ld_relaxed_sys(given + format.weight(role.lane)));
    return terms;
  }
};

// Adds a token's rows in the order of k, each product and sum rounded by itself.
template <DType kIn, DType kWire, int kCount>
__device__ __forceinline__ void stage_sum(const HtCombineRole& role, int32_t slot, const StagedTerms& terms) {
  constexpr int kRows = 2, kSteps = HtCombineGeometry::kPieceSteps;
  const HtCombineParams& p = role.p;
  const int64_t row_bytes = static_cast<int64_t>(p.hidden) * size_of(kIn);
  const unsigned all = __ballot_sync(~0u, terms.row >= 0);
  char* out = role.staged(role.peers.rank, slot, 0);
#pragma unroll 1
  for (int piece = 0; piece < role.geometry.pieces; piece++) {
    float sum[kSteps][kCount];
    fill(sum, all == 0 ? 0.0f : kNothingYet);
#pragma unroll 1
    for (unsigned mask = all; mask != 0;) {
      Numbers<kIn, kCount> rows[kRows][kSteps];
      unsigned rest = mask;
#pragma unroll
      for (int q = 0; q < kRows; q++) {
        if (rest == 0) break;
        const int32_t row = __shfl_sync(~0u, terms.row, __ffs(static_cast<int>(rest)) - 1);
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          rows[q][s].load_nc(static_cast<const char*>(p.rows) + row * row_bytes, role.lane_index<kCount>(piece, s));
        }
        rest &= rest - 1;
      }
#pragma unroll
      for (int q = 0; q < kRows; q++) {
        if (mask == 0) break;
        const float weight = __shfl_sync(~0u, terms.weight, __ffs(static_cast<int>(mask)) - 1);
#pragma unroll
        for (int s = 0; s < kSteps; s++) rows[q][s].add_product_to(sum[s], weight);
        mask &= mask - 1;
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int lane_index = (piece * kSteps + s) * 32 + role.lane;
      Numbers<kWire, kCount> numbers;
      numbers.from(sum[s]);
      if (lane_index * kCount < p.hidden) numbers.store(out, lane_index);
    }
  }
}

template <DType kTo, DType kFrom, int kCount>
__device__ __forceinline__ Numbers<kTo, kCount> converted(const Numbers<kFrom, kCount>& numbers) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) values[i] = kNothingYet;
  numbers.add_to(values);
  Numbers<kTo, kCount> result;
  result.from(values);
  return result;
}

// Rank layouts: a row as it is, in the wire's type.
template <DType kIn, DType kWire, int kCount>
__device__ __forceinline__ void stage_row(const HtCombineRole& role, int32_t slot, int32_t row) {
  const HtCombineParams& p = role.p;
  const char* in = static_cast<const char*>(p.rows) + static_cast<int64_t>(row) * p.hidden * size_of(kIn);
  char* out = role.staged(role.peers.rank, slot, 0);
#pragma unroll 4
  for (int lane_index = role.lane; lane_index * kCount < p.hidden; lane_index += 32) {
    Numbers<kIn, kCount> numbers;
    numbers.load_nc(in, lane_index);
    converted<kWire>(numbers).store(out, lane_index);
  }
}

__device__ __forceinline__ void stage_values(const HtCombineRole& role, int32_t slot, int32_t row) {
  const HtCombineParams& p = role.p;
  if (role.lane >= p.shape.topk) return;
  const bool expert_rows = has_expert_rows(p.output.layout);
  const int32_t place = expert_rows ? p.handle.slot(slot)[p.layout.slot.place(role.lane)] : row;
  float value = 0.0f;
  if (place >= 0) {
    value = p.values[expert_rows ? place : static_cast<int64_t>(place) * p.shape.topk + role.lane];
  }
  reinterpret_cast<float*>(role.staged(role.peers.rank, slot, role.values_part()))[role.lane] = value;
}

// A unit of staging, in the order (chunk, home, token), so that all homes can begin.
struct StagedUnit {
  int chunk, home, index;

  __device__ __forceinline__ static StagedUnit of(const HtCombineRole& role, int unit) {
    const int count = role.plan.chunks * role.num_ranks();
    int segment = -1;  // the last that begins at or before the unit
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
      const bool begins = first + role.lane < count && role.tables.chunk_start[first + role.lane] <= unit;
      segment += __popc(__ballot_sync(~0u, begins));
    }
    StagedUnit found;
    found.chunk = segment / role.num_ranks();
    found.home = segment % role.num_ranks();
    found.index = chunk_begin(found.chunk, role.tables.flows.from[found.home], role.plan.chunks) + unit -
                  role.tables.chunk_start[segment];
    return found;
  }
};

template <DType kIn, DType kWire, int kCount>
__device__ __forceinline__ void stage_rows(const HtCombineRole& role) {
  const HtCombineParams& p = role.p;
  const bool is_home_weighted = p.weighting == Weighting::kHome && p.has_rows();
  if (is_home_weighted && !await_all(role, HtSignal::kCombineWeights, Phase::kWeights)) return;
  const bool is_copied = p.has_rows() && !p.reads_in_place();
  const int units = role.tables.chunk_start[role.plan.chunks * role.num_ranks()];
  HtCounters& counters = counters_of(role.call);
  Tickets tickets{&counters.staged};
  tickets.ask();
#pragma unroll 1
  for (int unit = tickets.take(); unit < units; unit = tickets.take()) {
    tickets.ask();
    testing_point(Point::kBetweenRows, role.call, unit);
    const StagedUnit at = StagedUnit::of(role, unit);
    const int first = role.tables.flows.from_first[at.home];
    const int32_t slot = first + at.index;
    int32_t row = kNoRow;
    if (!has_expert_rows(p.output.layout)) row = p.output.row(at.home, first, at.index);
    if (is_copied && has_expert_rows(p.output.layout)) {
      stage_sum<kIn, kWire, kCount>(role, slot, StagedTerms::load(role, slot));
    } else if (is_copied && row >= 0) {
      stage_row<kIn, kWire, kCount>(role, slot, row);
    }
    if (p.has_values) stage_values(role, slot, row);
    __syncwarp();
    if (role.lane != 0) continue;
    const int size = chunk_size(at.chunk, role.tables.flows.from[at.home], role.plan.chunks);
    __threadfence();
    const uint32_t staged = atomicAdd(&counters.ready[at.home * kHtChunks + at.chunk], 1u) + 1;
    if (staged == (has_bug(Bug::kEarlyRows, Kind::kCombine) ? 1u : static_cast<uint32_t>(size))) {
      send_signal(role.call, p.layout, role.peers, at.home, HtSignal::kCombineReady, at.chunk);
    }
  }
}

}  // namespace ep
