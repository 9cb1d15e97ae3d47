// High-throughput combine: a rank makes its rows readable (where they lie, or added up in the staging rows), the home
// ranks pull them and add the ranks up. The table of contents is ht_combine(), at the end.
#pragma once

#include "cuda/ht_combine_stage.cuh"
#include "cuda/stamps.cuh"

namespace ep {

// ---- Reading

// A token's choices, one a lane; then, one a lane, the rows to add in the order of ranks.
struct PullRoute {
  OwnChoice choice;
  Group group;
  uint64_t ranks = 0;
  // Of the lane-th rank that has an expert of the token:
  const char* source = nullptr;  // null: that rank has dropped all rows of the token
  bool is_in_place = false;

  __device__ __forceinline__ static PullRoute load(const HtCombineRole& role, int token) {
    PullRoute route;
    route.choice = OwnChoice::load(role.p.handle.own, role.p.shape.topk, token);
    return route;
  }

  // Waits for chunks that the ranks announce. False: a wait was given up.
  __device__ __forceinline__ bool resolve(const HtCombineRole& role) {
    const HtCombineParams& p = role.p;
    group = Group::of(choice.id, role.geometry.by_local_experts);
    ranks = destinations(role.num_ranks(), Choice{group.rank});
    const int32_t first_row = group.first_fitting(choice.row);
    const char* mine = nullptr;
    bool ok = true;
    if (group.leads) {
      const int rank = group.rank;
      const Offset offset = role.tables.offsets[rank];
      const bool in_place = offset != kNoOffset;
      if (p.has_values || !in_place) {
        const int chunk =
            chunk_of(choice.slot - role.tables.flows.to_first[rank], role.tables.flows.to[rank], kHtChunks);
        ok = await_signal(role.call, p.layout, role.peers, HtSignal::kCombineReady, rank, chunk, Phase::kReady);
      }
      if (first_row >= 0 && p.has_rows()) {
        mine = in_place
                   ? role.peers.at<char>(rank, offset) + static_cast<int64_t>(first_row) * p.hidden * size_of(p.dtype)
                   : role.staged(rank, choice.slot, 0);
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

// A lane's numbers of a row as they lie on another rank.
template <DType kIn, DType kWire, int kCount>
struct PulledPiece {
  Numbers<kIn, kCount> rows;
  Numbers<kWire, kCount> sums;

  __device__ __forceinline__ void load(const char* from, bool in_place) {
    if (kIn != kWire && in_place) {
      rows.load_relaxed_sys(from, 0);
    } else {
      sums.load_relaxed_sys(from, 0);
    }
  }
  __device__ __forceinline__ void add_to(float (&total)[kCount], bool in_place) {
    if (kIn != kWire && in_place) sums = converted<kWire>(rows);
    sums.add_to(total);
  }
};

template <int kCount>
__device__ __forceinline__ void add_zeros(float (&total)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) total[i] = __fadd_rn(total[i], 0.0f);
}

// Four of a token's rows, a piece of each. A row's numbers of the next position are asked for as soon as those of this
// one are added, so that as many loads are under way throughout.
template <DType kIn, DType kWire, int kCount>
struct PulledRows {
  static constexpr int kTogether = 4, kSteps = HtCombineGeometry::kPieceSteps;

  const HtCombineRole& role;
  const PullRoute& route;
  int count;
  unsigned exists, in_place;    // bit i: the i-th row
  int piece = 0, first = 0;     // that are asked for next
  const char* from[kTogether];  // and where this lane's numbers lie; null: nowhere
  PulledPiece<kIn, kWire, kCount> pieces[kTogether][kSteps];

  __device__ __forceinline__ static PulledRows of(const HtCombineRole& role, const PullRoute& route) {
    const unsigned exists = __ballot_sync(~0u, route.source != nullptr);
    const unsigned in_place = kIn != kWire ? __ballot_sync(~0u, route.is_in_place) : 0;
    return {role, route, __popcll(route.ranks), exists, in_place};
  }
  __device__ __forceinline__ bool is_as_given(int row) const { return kIn != kWire && (in_place >> row & 1) != 0; }
  // Of all lanes.
  __device__ __forceinline__ int step_bytes(int row) const {
    return 32 * kCount * size_of(is_as_given(row) ? kIn : kWire);
  }
  __device__ __forceinline__ void aim() {
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      const int row = min(first + q, 31), bytes = step_bytes(row);
      const auto source = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(route.source), row);
      const bool is_there = first + q < count && source != 0;
      from[q] = is_there ? reinterpret_cast<const char*>(source) + piece * kSteps * bytes + role.lane * (bytes / 32)
                         : nullptr;
    }
  }
  __device__ __forceinline__ void move_on() {
    first += kTogether;
    if (first >= count) {
      first = 0;
      piece++;
    }
    if (count > kTogether) aim();  // else ask() has moved
  }
  __device__ __forceinline__ void ask(int q) {
    if (from[q] == nullptr) return;
    const int bytes = step_bytes(min(first + q, 31));
    const int rest = role.p.hidden / kCount - piece * kSteps * 32 - role.lane;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {  // numbers past the row stay what they were, and nobody looks
      if (32 * s < rest) pieces[q][s].load(from[q] + s * bytes, is_as_given(first + q));
    }
    from[q] += kSteps * bytes;
  }
  __device__ __forceinline__ void add_to(float (&total)[kSteps][kCount], int row, int q) {
    if (row >= count) return;
    if ((exists >> row & 1) != 0) {
#pragma unroll
      for (int s = 0; s < kSteps; s++) pieces[q][s].add_to(total[s], is_as_given(row));
    } else {  // a rank that has dropped all rows of the token counts with +0
#pragma unroll
      for (int s = 0; s < kSteps; s++) add_zeros(total[s]);
    }
  }
};

template <DType kOut, int kSteps, int kCount>
__device__ __forceinline__ void add_biases(const HtCombineRole& role, int64_t out_row, int piece,
                                           float (&total)[kSteps][kCount]) {
#pragma unroll 1
  for (int b = 0; b < 2; b++) {
    const void* bias = role.p.bias[b];
    if (bias == nullptr) continue;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int lane_index = (piece * kSteps + s) * 32 + role.lane;
      if (lane_index * kCount >= role.p.hidden) continue;
      Numbers<kOut, kCount> numbers;
      numbers.load_nc(static_cast<const char*>(bias) + out_row, lane_index);
      numbers.add_to(total[s]);
    }
  }
}

template <DType kIn, DType kWire, DType kOut, int kCount>
__device__ __forceinline__ void add_up_token(const HtCombineRole& role, int token, const PullRoute& route) {
  using Rows = PulledRows<kIn, kWire, kCount>;
  constexpr int kTogether = Rows::kTogether, kSteps = Rows::kSteps;
  const HtCombineParams& p = role.p;
  const int64_t out_row = static_cast<int64_t>(token) * p.hidden * size_of(kOut);
  const bool has_bias = p.bias[0] != nullptr || p.bias[1] != nullptr;
  Rows rows = Rows::of(role, route);
  rows.aim();
#pragma unroll
  for (int q = 0; q < kTogether; q++) rows.ask(q);
#pragma unroll 1
  for (int piece = 0; piece < role.geometry.pieces; piece++) {
    float total[kSteps][kCount];
    fill(total, rows.count > 0 || has_bias ? kNothingYet : 0.0f);
    if (has_bias) add_biases<kOut>(role, out_row, piece, total);
#pragma unroll 1
    for (int first = 0; first < rows.count; first += kTogether) {
      rows.move_on();
#pragma unroll
      for (int q = 0; q < kTogether; q++) {
        rows.add_to(total, first + q, q);
        rows.ask(q);
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
  if (route.choice.id >= 0) {
    const auto* words =
        reinterpret_cast<const uint32_t*>(role.staged(route.group.rank, route.choice.slot, role.values_part()));
    value = __uint_as_float(ptx::ld_relaxed_sys(words + role.lane));
  }
  p.out_values[static_cast<int64_t>(token) * p.shape.topk + role.lane] = value;
}

template <DType kIn, DType kWire, DType kOut, int kCount>
__device__ __forceinline__ void pull_rows(const HtCombineRole& role) {
  const HtCombineParams& p = role.p;
  testing_point(Point::kBeforeReceive, role.call);
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
  testing_point(Point::kBeforeReset, role.call);
  const uint32_t before = count_finished(counters_of(role.call).finished, done);
  const bool is_early = has_bug(Bug::kEarlyDone, Kind::kCombine) && p.num_tokens > 0;
  if (is_early ? before != 0 : before + done != static_cast<uint32_t>(p.num_tokens)) return;
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
  EP_SHARED(CallContext, call);
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
