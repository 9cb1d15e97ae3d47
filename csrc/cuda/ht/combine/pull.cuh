// What a home rank does in a combine of high throughput: it pulls the rows of its tokens from the ranks that have them,
// and adds them up in the order of ranks. Links use the same stream of rows for sums of domains.
#pragma once

#include "cuda/device/home_sum.cuh"
#include "cuda/ht/combine/stage.cuh"

namespace ep {
inline namespace EP_KERNELS {

// A token's choices, one a lane; then, one a lane, the rows to add in the order of ranks.
struct PullRoute {
  OwnChoice choice;
  SameOwner group;
  int flow = -1;      // of the choice's row, from its rank to this one
  int num_ranks = 0;  // that have an expert of the token
  // Of the lane-th rank that has an expert of the token:
  const char* source = nullptr;  // null: that rank has dropped all rows of the token
  bool is_in_place = false;

  __device__ __forceinline__ static PullRoute of(const HtCombineRole& role, const OwnChoice& choice) {
    PullRoute route;
    route.choice = choice;
    route.group = SameOwner::of(role, choice);
    route.flow = route.group.rank;
    return route;
  }
  // The chunk that the leader's rank must have announced; -1: none.
  __device__ __forceinline__ int chunk(const HtCombineRole& role) const {
    if (!group.leads || (!role.p.has_values && role.reads_in_place(group.rank))) return -1;
    const Flows& flows = role.tables.flows;
    return chunk_of(choice.slot - flows.to_first[flow], flows.to[flow], role.tables.announced);
  }
  // Acquire.
  __device__ __forceinline__ bool is_ready(const HtCombineRole& role) const {
    const int needed = chunk(role);
    bool ok = needed < 0 || role.tables.knows_ready(flow, needed);
    if (!ok && is_signalled(role.op, role.p.offsets, role.peers, HtSignal::kCombineReady, flow, needed)) {
      role.tables.note_ready(flow, needed);
      ok = true;
    }
    const bool all = __all_sync(~0u, ok) != 0;
    __syncwarp();
    return all;
  }
  // The same once they are. False: a wait was given up.
  __device__ __forceinline__ bool await(const HtCombineRole& role) const {
    const int needed = chunk(role);
    const bool ok =
        needed < 0 || role.tables.knows_ready(flow, needed) ||
        await_signal(role.op, role.p.offsets, role.peers, HtSignal::kCombineReady, flow, needed, Awaited::kReady);
    const bool all = __all_sync(~0u, ok) != 0;
    __syncwarp();
    return all;
  }
  __device__ __forceinline__ void resolve(const HtCombineRole& role) {
    const HtCombineParams& p = role.p;
    const int32_t first_row = group.first_fitting(choice.row);
    const char* mine = nullptr;
    if (group.leads && first_row >= 0 && p.has_rows()) {
      const Offset offset = role.tables.offsets[group.rank];
      const Offset row_bytes = p.hidden * size_of(p.dtype), row = offset + first_row * row_bytes;
      if (!role.reads_in_place(group.rank)) {
        mine = role.staged(group.rank, choice.slot, 0);
      } else if (group.rank == role.peers.rank) {
        if (first_row < p.output.rows()) mine = static_cast<const char*>(p.rows) + first_row * row_bytes;
      } else if (row + row_bytes <= p.offsets.arena_end) {
        mine = role.peers.at<char>(group.rank, row);
      }
    }
    // From the leaders' lanes to the order of ranks.
    const auto address = reinterpret_cast<unsigned long long>(mine);
    LaneRanks rest = LaneRanks::of(group.rank);
#pragma unroll 1
    for (; rest.has_more(role.num_ranks()); num_ranks++) {
      const int rank = rest.take();
      const int leader = __ffs(static_cast<int>(__ballot_sync(~0u, group.leads && group.rank == rank))) - 1;
      const unsigned long long found = __shfl_sync(~0u, address, leader);
      if (role.lane != num_ranks) continue;
      source = reinterpret_cast<const char*>(found);
      is_in_place = role.reads_in_place(rank);
    }
  }
};

__device__ __forceinline__ void read_values(const HtCombineRole& role, int token, const PullRoute& route) {
  const HtCombineParams& p = role.p;
  if (role.lane >= p.shape.topk) return;
  float value = 0.0f;
  if (route.group.rank >= 0) {
    const auto* words =
        reinterpret_cast<const uint32_t*>(role.staged(route.group.rank, route.choice.slot, role.values_part()));
    value = __uint_as_float(ptx::ld_relaxed_sys(words + role.lane));
  }
  p.out_values[static_cast<int64_t>(token) * p.shape.topk + role.lane] = value;
}

// Some pieces of a token's rows in the order of ranks, as they lie there.
// kTermsAlone: without biases and without a scale.
template <DType kIn, DType kWire, DType kOut, int kLaneCount, bool kTermsAlone = false>
struct PulledRows {
  static constexpr int kCount = kLaneCount, kSteps = CopyRing::kSteps;
  static constexpr int kFailed = INT32_MAX;

  const HtCombineRole& role;
  Tickets tickets;
  int next_unit = 0;  // kFailed: a wait was given up
  OwnChoice next;     // of its token
  PieceRange pieces;
  OfUnits<unsigned> rows;
  OfUnits<unsigned> in_place;    // of them, those that are not of the wire's type
  OfUnits<int> tokens;           // bit 0: the sum begins with 0; above it the token
  const char* source = nullptr;  // of the lane-th row of the unit turned to

  __device__ __forceinline__ explicit PulledRows(const HtCombineRole& a_role) : role(a_role) {
    tickets.prefetch(counters_of(role.op).taken);
    prefetch_next();
  }
  struct NoUnits {};  // of the own tokens
  __device__ __forceinline__ PulledRows(const HtCombineRole& a_role, NoUnits) : role(a_role) {}
  __device__ __forceinline__ void prefetch_next() {
    next_unit = tickets.next();
    if (next_unit >= role.geometry.units) return;
    tickets.prefetch(counters_of(role.op).taken);
    next = OwnChoice::load(role.p.handle.own, role.p.shape.topk, role.geometry.by_parts.divide(next_unit));
  }
  __device__ __forceinline__ bool await() {
    if (next_unit >= role.geometry.units) return false;
    const bool ok = PullRoute::of(role, next).await(role);
    if (!ok) next_unit = kFailed;
    return ok;
  }
  __device__ __forceinline__ bool turn(unsigned unit) {
    const HtCombineParams& p = role.p;
    const HtCombineGeometry& g = role.geometry;
    if (next_unit >= g.units) return false;
    PullRoute route = PullRoute::of(role, next);
    if (!route.is_ready(role)) return false;
    route.resolve(role);
    const int token = g.by_parts.divide(next_unit), part = g.by_parts.remainder(next_unit, token);
    pieces.first = part * g.unit_pieces;
    pieces.end = min(pieces.first + g.unit_pieces, g.pieces);
    if (p.has_values && part == 0) read_values(role, token, route);
    const unsigned found = __ballot_sync(~0u, route.source != nullptr);
    rows.put(unit, found);
    // A rank that has dropped all rows of the token counts with +0: it is no matter when that is added.
    const bool has_all = __popc(found) == route.num_ranks;
    const bool begins_with_zero = !has_all || (found == 0 && (kTermsAlone || !begins_with_bias(p)));
    if (kIn != kWire) in_place.put(unit, __ballot_sync(~0u, route.is_in_place));
    put_token(unit, token, begins_with_zero);
    source = route.source;
    prefetch_next();
    return true;
  }
  __device__ __forceinline__ bool is_as_given(unsigned unit, int row) const {
    return kIn != kWire && !kIsBlockFormat<kWire> && (in_place.get(unit) >> row & 1) != 0;
  }
  template <DType kType>
  __device__ __forceinline__ void prefetch_as(CopyRing& ring, const char* from, int piece) const {
    if constexpr (kIsBlockFormat<kType>) {
      ring.prefetch_blocks<kType>(from, role.p.hidden, piece * kSteps * 32 + role.lane, role.rest(piece));
    } else {
      constexpr int kLaneBytes = Numbers<kType, kCount>::kLaneBytes;
      ring.prefetch<kLaneBytes>(from + (piece * kSteps * 32 + role.lane) * kLaneBytes, role.rest(piece));
    }
  }
  __device__ __forceinline__ void prefetch(CopyRing& ring, unsigned unit, int row, int piece) const {
    const auto address = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(source), row);
    const auto* from = reinterpret_cast<const char*>(address);
    if (is_as_given(unit, row)) {
      prefetch_as<kIn>(ring, from, piece);
    } else {
      prefetch_as<kWire>(ring, from, piece);
    }
  }
  __device__ __forceinline__ void take_over() {}
  __device__ __forceinline__ void put_token(unsigned unit, int token, bool begins_with_zero) {
    tokens.put(unit, token << 1 | (begins_with_zero ? 1 : 0));
  }
  __device__ __forceinline__ float nothing_of(unsigned unit) const {
    return (tokens.get(unit) & 1) != 0 ? 0.0f : kNothingYet;
  }
  __device__ __forceinline__ HomePlace place_of(unsigned unit, int piece) const {
    const int64_t row = static_cast<int64_t>(tokens.get(unit) >> 1) * (role.p.hidden * size_of(kOut));
    return {row, piece * kSteps * 32 + role.lane, role.rest(piece)};
  }
  __device__ __forceinline__ void begin(unsigned unit, int piece, float (&sum)[kSteps][kCount]) const {
    if constexpr (kTermsAlone) {
      fill(sum, nothing_of(unit));
    } else {
      begin_home_sum<kOut>(
          role.p, [&] { return place_of(unit, piece); }, nothing_of(unit), sum);
    }
  }
  __device__ __forceinline__ void add(unsigned unit, int row, ptx::SharedAddress item,
                                      float (&sum)[kSteps][kCount]) const {
    if (is_as_given(unit, row)) {
#pragma unroll
      for (int s = 0; s < kSteps; s++) converted<kWire>(ringed<kIn, kCount>(item, s)).add_to(sum[s]);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; s++) ringed<kWire, kCount>(item, s).add_to(sum[s]);
    }
  }
  __device__ __forceinline__ void store(unsigned unit, int piece, float (&sum)[kSteps][kCount]) const {
    if (!role.p.has_rows()) return;
    if constexpr (kTermsAlone) {
      store_terms<kOut>(role.p, place_of(unit, piece), sum);
    } else {
      store_home_sum<kOut>(role.p, place_of(unit, piece), sum);
    }
  }
  __device__ __forceinline__ void finish(unsigned) const {}
};

template <DType kIn, DType kWire, DType kOut, int kCount, bool kTermsAlone>
__device__ __forceinline__ void pull_rows(const HtCombineRole& role, char* rings) {
  using Rows = PulledRows<kIn, kWire, kOut, kCount, kTermsAlone>;
  const HtCombineParams& p = role.p;
  testing_point(Point::kBeforeReceive, role.op);
  Rows rows(role);
  RowStream<Rows> stream{rows, CopyRing(role.ring(rings))};
  stream.run();
  // The last warp to have read signals every rank: its rows belong to it again.
  const int done = static_cast<int>(stream.num_begun);
  if (rows.next_unit == Rows::kFailed || (done == 0 && p.num_tokens > 0)) return;
  testing_point(Point::kBeforeReset, role.op);
  const uint32_t before = count_finished(counters_of(role.op).finished, done);
  const bool is_early = has_bug(Bug::kEarlyDone, Kind::kCombine) && p.num_tokens > 0;
  if (is_early ? before != 0 : before + done != static_cast<uint32_t>(role.geometry.units)) return;
  if (p.num_tokens == 0 && !(role.is_first() && role.warp == 0)) return;
#pragma unroll 1
  for (int peer = role.lane; peer < role.num_ranks(); peer += 32) {
    send_signal(role.op, p.offsets, role.peers, peer, HtSignal::kCombineDone, 0);
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
