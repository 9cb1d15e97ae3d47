// High-throughput combine: a rank makes its rows readable (where they lie, or added up in the staging rows), the home
// ranks pull them and add the ranks up. The table of contents is ht_combine(), at the end.
#pragma once

#include "cuda/ht_call.cuh"
#include "cuda/numbers.cuh"
#include "cuda/stamps.cuh"

namespace ep {

struct CombineTables {
  Offset* offsets;         // [R] of rows that are read in place
  int *to, *to_first;      // [R] own tokens with an expert there, and their first slot there
  int *from, *from_first;  // [R] rows here of each home, and the first slot
  int* chunk_start;        // [chunks * R + 1] slots staged before (chunk, home)

  __device__ static CombineTables of(char* shared, int ranks) {
    CombineTables t;
    t.offsets = reinterpret_cast<Offset*>(shared);
    t.to = reinterpret_cast<int*>(t.offsets + ranks);
    t.to_first = t.to + ranks;
    t.from = t.to_first + ranks;
    t.from_first = t.from + ranks;
    t.chunk_start = t.from_first + ranks;
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
    const Flow flow = Flow::between(p.handle.counts, ranks, rank, r, role.lane);
    if (role.lane != 0) continue;
    t.offsets[r] = await_call_offset(role.call, p.layout, role.peers, r, kCombineRowsOffset);
    t.to[r] = flow.to;
    t.to_first[r] = flow.to_first;
    t.from[r] = flow.from;
    t.from_first[r] = flow.from_first;
  }
  __syncthreads();
  if (!role.geometry.has_staging || role.warp != 0) return;
  int next = 0;
#pragma unroll 1
  for (int first = 0; first <= chunks * ranks; first += 32) {
    const int i = first + role.lane;
    int size = 0;
    if (i < chunks * ranks) {
      const int chunk = i / ranks, count = t.from[i - chunk * ranks];
      size = chunk_begin(chunk + 1, count, chunks) - chunk_begin(chunk, count, chunks);
    }
    const int end = inclusive_sum(size);
    if (i <= chunks * ranks) t.chunk_start[i] = next + end - size;
    next += __shfl_sync(~0u, end, 31);
  }
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
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
#pragma unroll
      for (int i = 0; i < kCount; i++) sum[s][i] = all == 0 ? 0.0f : kNothingYet;
    }
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
    float values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = kNothingYet;
    numbers.add_to(values);
    Numbers<kWire, kCount> wire;
    wire.from(values);
    wire.store(out, lane_index);
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
    found.index = chunk_begin(found.chunk, role.tables.from[found.home], role.plan.chunks) + unit -
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
    const StagedUnit at = StagedUnit::of(role, unit);
    const int first = role.tables.from_first[at.home];
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
    const int count = role.tables.from[at.home], chunks = role.plan.chunks;
    const int size = chunk_begin(at.chunk + 1, count, chunks) - chunk_begin(at.chunk, count, chunks);
    __threadfence();
    if (atomicAdd(&counters.ready[at.home * kHtChunks + at.chunk], 1u) + 1 == static_cast<uint32_t>(size)) {
      send_signal(role.call, p.layout, role.peers, at.home, HtSignal::kCombineReady, at.chunk);
    }
  }
}

// ---- Reading

// A token's choices, one a lane; then, one a lane, the rows to add in the order of ranks.
struct PullRoute {
  int id = -1;
  int32_t slot = kNoRow, row = kNoRow;
  Group group;
  uint64_t ranks = 0;
  // Of the lane-th rank that has an expert of the token:
  const char* source = nullptr;  // null: that rank has dropped all rows of the token
  bool is_in_place = false;

  __device__ __forceinline__ static PullRoute load(const HtCombineRole& role, int token) {
    const HtCombineParams& p = role.p;
    PullRoute route;
    if (role.lane < p.shape.topk) {
      const int64_t entry = static_cast<int64_t>(token) * p.shape.topk + role.lane;
      route.id = p.handle.own.ids[entry];
      route.row = p.handle.own.rows[entry];
      route.slot = p.handle.own.slots[entry];
    }
    return route;
  }

  // Waits for chunks that the ranks announce. False: a wait was given up.
  __device__ __forceinline__ bool resolve(const HtCombineRole& role) {
    const HtCombineParams& p = role.p;
    group = Group::of(id, role.geometry.by_local_experts);
    Choice choice;
    choice.rank = group.rank;
    ranks = destinations(role.num_ranks(), choice);
    const unsigned fitting = __ballot_sync(~0u, row >= 0) & group.lanes;
    const int32_t first_row = __shfl_sync(~0u, row, fitting != 0 ? __ffs(static_cast<int>(fitting)) - 1 : role.lane);
    const char* mine = nullptr;
    bool ok = true;
    if (group.leads) {
      const int rank = group.rank;
      const Offset offset = role.tables.offsets[rank];
      const bool in_place = offset != kNoOffset;
      if (p.has_values || !in_place) {
        const int chunk = chunk_of(slot - role.tables.to_first[rank], role.tables.to[rank], kHtChunks);
        ok = await_signal(role.call, p.layout, role.peers, HtSignal::kCombineReady, rank, chunk, Phase::kReady);
      }
      if (fitting != 0 && p.has_rows()) {
        mine = in_place
                   ? role.peers.at<char>(rank, offset) + static_cast<int64_t>(first_row) * p.hidden * size_of(p.dtype)
                   : role.staged(rank, slot, 0);
      }
    }
    ok = __all_sync(~0u, ok);
    __syncwarp();
    // From the leaders' lanes to the order of ranks.
    const auto address = reinterpret_cast<unsigned long long>(mine);
    int lane = 0;
#pragma unroll 1
    for (uint64_t rest = ranks; rest != 0; rest &= rest - 1, lane++) {
      const int rank = __ffsll(static_cast<long long>(rest)) - 1;
      const int leader = __ffs(static_cast<int>(__ballot_sync(~0u, group.leads && group.rank == rank))) - 1;
      const unsigned long long found = __shfl_sync(~0u, address, leader);
      if (role.lane != lane) continue;
      source = reinterpret_cast<const char*>(found);
      is_in_place = role.tables.offsets[rank] != kNoOffset;
    }
    return ok;
  }
};

// A lane's numbers of a row as they lie on another rank. Lanes past the row read its last numbers, and nobody looks: a
// load with an alternative would be waited for where it stands.
template <DType kIn, DType kWire, int kCount>
struct PulledPiece {
  Numbers<kIn, kCount> rows;
  Numbers<kWire, kCount> sums;

  __device__ __forceinline__ void load(const char* source, bool in_place, int lane_index) {
    if (kIn != kWire && in_place) {
      rows.load_relaxed_sys(source, lane_index);
    } else {
      sums.load_relaxed_sys(source, lane_index);
    }
  }
  __device__ __forceinline__ void add_to(float (&total)[kCount], bool in_place) {
    if (kIn != kWire && in_place) {
      float values[kCount];
#pragma unroll
      for (int i = 0; i < kCount; i++) values[i] = kNothingYet;
      rows.add_to(values);
      sums.from(values);
    }
    sums.add_to(total);
  }
};

template <DType kIn, DType kWire, DType kOut, int kCount>
__device__ __forceinline__ void add_up_token(const HtCombineRole& role, int token, const PullRoute& route) {
  constexpr int kTogether = 4, kSteps = HtCombineGeometry::kPieceSteps;
  const HtCombineParams& p = role.p;
  const int count = __popcll(route.ranks);
  const int64_t out_row = static_cast<int64_t>(token) * p.hidden * size_of(kOut);
  const bool has_bias = p.bias[0] != nullptr || p.bias[1] != nullptr;
#pragma unroll 1
  for (int piece = 0; piece < role.geometry.pieces; piece++) {
    float total[kSteps][kCount];
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
#pragma unroll
      for (int i = 0; i < kCount; i++) total[s][i] = count > 0 || has_bias ? kNothingYet : 0.0f;
    }
#pragma unroll 1
    for (int b = 0; has_bias && b < 2; b++) {
      if (p.bias[b] == nullptr) continue;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const int lane_index = (piece * kSteps + s) * 32 + role.lane;
        if (lane_index * kCount >= p.hidden) continue;
        Numbers<kOut, kCount> numbers;
        numbers.load_nc(static_cast<const char*>(p.bias[b]) + out_row, lane_index);
        numbers.add_to(total[s]);
      }
    }
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether) {
      PulledPiece<kIn, kWire, kCount> pieces[kTogether][kSteps];
      const char* source[kTogether];
      bool in_place[kTogether];
#pragma unroll
      for (int q = 0; q < kTogether; q++) {
        const int lane = min(first + q, 31);
        source[q] =
            reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(route.source), lane));
        in_place[q] = kIn != kWire && __shfl_sync(~0u, route.is_in_place ? 1 : 0, lane) != 0;
      }
#pragma unroll
      for (int q = 0; q < kTogether; q++) {
        if (first + q >= count || source[q] == nullptr) continue;
#pragma unroll
        for (int s = 0; s < kSteps; s++) pieces[q][s].load(source[q], in_place[q], role.lane_index<kCount>(piece, s));
      }
#pragma unroll
      for (int q = 0; q < kTogether; q++) {
        if (first + q >= count) break;
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          if (source[q] != nullptr) {
            pieces[q][s].add_to(total[s], in_place[q]);
          } else {  // a rank that has dropped all rows of the token counts with +0
#pragma unroll
            for (int i = 0; i < kCount; i++) total[s][i] = __fadd_rn(total[s][i], 0.0f);
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int lane_index = (piece * kSteps + s) * 32 + role.lane;
      Numbers<kOut, kCount> out;
      out.from(total[s]);
      if (lane_index * kCount < p.hidden) out.store(static_cast<char*>(p.out) + out_row, lane_index);
    }
  }
}

__device__ __forceinline__ void take_values(const HtCombineRole& role, int token, const PullRoute& route) {
  const HtCombineParams& p = role.p;
  if (role.lane >= p.shape.topk) return;
  float value = 0.0f;
  if (route.id >= 0) {
    const auto* words =
        reinterpret_cast<const uint32_t*>(role.staged(route.group.rank, route.slot, role.values_part()));
    value = __uint_as_float(ptx::ld_relaxed_sys(words + role.lane));
  }
  p.out_values[static_cast<int64_t>(token) * p.shape.topk + role.lane] = value;
}

template <DType kIn, DType kWire, DType kOut, int kCount>
__device__ __forceinline__ void pull_rows(const HtCombineRole& role) {
  const HtCombineParams& p = role.p;
  Tickets tickets{&counters_of(role.call).taken};
  tickets.ask();
  int token = tickets.take(), done = 0;
  PullRoute next;
  if (token < p.num_tokens) next = PullRoute::load(role, token);
#pragma unroll 1
  while (token < p.num_tokens) {
    tickets.ask();
    PullRoute route = next;
    const bool ok = route.resolve(role);
    if (!ok) return;
    if (p.has_rows()) add_up_token<kIn, kWire, kOut, kCount>(role, token, route);
    if (p.has_values) take_values(role, token, route);
    token = tickets.take();
    if (token < p.num_tokens) next = PullRoute::load(role, token);
    done++;
  }
  // The last to have read tells every rank that its rows are its own again.
  if (done == 0 && p.num_tokens > 0) return;
  const uint32_t before = count_finished(role.call, done);
  if (before + done != static_cast<uint32_t>(p.num_tokens)) return;
  if (p.num_tokens == 0 && !(role.is_first() && role.warp == 0)) return;
#pragma unroll 1
  for (int peer = role.lane; peer < role.num_ranks(); peer += 32) {
    send_signal(role.call, p.layout, role.peers, peer, HtSignal::kCombineDone, 0);
  }
}

// ---- Table of contents

template <DType kIn, DType kWire, DType kOut>
__device__ __forceinline__ void ht_combine(const KernelArgs<HtCombineParams>& args, BlockPosition at, char* shared) {
  constexpr int kCount = kLaneElements<kIn, kWire, kOut>;
  const HtCombineParams& p = args.params;
  const LsaPeers& peers = args.peers;
  __shared__ CallContext call;
  const HtCombineRole role{
      {at}, p, args.geometry, args.plan, peers, call, CombineTables::of(shared, p.shape.num_ranks)};
  stamp(Stamp::kStart, peers.rank);
  if (!open_ht_call(call, args, Kind::kCombine, at, true)) return;
  if (role.is_first()) {
    clear_next_counters(call);
    send_call(call, p.layout, peers, kCombineCallWords, [&](int index) { return combine_word_of(p, index); });
  }
  await_records(call, p.layout, peers);
  fill_tables(role);
  if (block_has_failed(call)) return;
  if (role.is_first()) {
    const bool is_copied = p.has_rows() && !p.reads_in_place() && !has_expert_rows(p.output.layout);
    if (role.thread() == 0 && is_copied) call.state->ht_staged[1] += 1;
    if (p.weighting == Weighting::kHome && p.has_rows()) send_weights(role);
  }
  const bool stages = args.geometry.has_staging && role.warp >= args.plan.workers;
  stamp(Stamp::kEpochKnown, peers.rank);
  if (stages) {
    stage_rows<kIn, kWire, kCount>(role);
    stamp(Stamp::kSent, peers.rank);
  } else {
    pull_rows<kIn, kWire, kOut, kCount>(role);
    stamp(Stamp::kOwnDone, peers.rank);
  }
  // The input is the caller's again when all have read.
  if (role.is_first() && role.warp == 0) await_all(role, HtSignal::kCombineDone, Phase::kDone);
  stamp(Stamp::kEnd, peers.rank);
}

}  // namespace ep
