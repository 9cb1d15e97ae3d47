// How a dispatch over several domains sends its own rows: a token's row goes to the ranks of the own domain as in a
// world of one, and once for each other domain, with the token's route behind it, to its place in the staging for the
// rail peer there. The worker that completes a chunk of that puts it.
#pragma once

#include "cuda/ht/dispatch/receive_role.cuh"
#include "cuda/ht/dispatch/send.cuh"
#include "cuda/ht/links/links.cuh"

namespace ep {
inline namespace EP_KERNELS {

// What workers count: rows of a flow (FlowEnds) that lie at their receiver, by its chunks; then rows of a domain's
// chunk that lie in the staging.
constexpr int kFlowCounters = kMaxRanks * kHtChunks;

// The staging's chunk `chunk` for `domain`, of so many rows, or a signal alone if the rank has no token for it.
__device__ __forceinline__ void send_chunk(const SendRole& role, int domain, int chunk, int rows) {
  const HtRail& rail = role.part.rail;
  const int tokens = role.p.num_tokens, share = ht_rail_share(tokens), channel = kFirstChunkChannel + chunk;
  if (chunk * share >= tokens) return post(role.op, role.part, domain, channel, 0, 0, 0);
  const uint64_t at = rail.chunk_at(share, chunk);
  const Offset source = rail.out_part(domain) + at;
  auto* header = role.peers.local<HtRailHeader>(source);
  header->rows = rows;
  header->all = static_cast<int32_t>(ptx::ld_relaxed_gpu(&rail_counters_of(role.op).places[domain]));
  const uint64_t bytes = sizeof(HtRailHeader) + static_cast<uint64_t>(rows) * rail.entry_bytes;
  post(role.op, role.part, domain, channel, rail.in_part(rail.domain) + at, source, bytes);
  stamp_put(role.op);
  if (has_bug(Bug::kEarlySource, Kind::kDispatch) && rows > 0) {
    *role.peers.local<uint32_t>(source + sizeof(HtRailHeader)) ^= 0x55;
  }
}

// Of flows, and of chunks of the staging.
struct CrossingCounts {
  __device__ __forceinline__ static int of_flow(const SendRole& role, int flow, int receiver, int32_t slot) {
    const Flows& flows = role.tables.flows;
    const int chunk = chunk_of(slot - flows.to_first[flow], flows.to[flow], role.tables.chunks[receiver]);
    return flow * kHtChunks + chunk;
  }
  template <class Route>
  __device__ __forceinline__ static int counter_of(const SendRole& role, const Route& route) {
    return route.counter(role);
  }
  __device__ __forceinline__ static void count(const SendRole& role, int counter) {
    if (counter >= kFlowCounters) return count_staged(role, counter - kFlowCounters);
    const int flow = counter / kHtChunks, chunk = counter % kHtChunks;
    const FlowEnds ends = FlowEnds::of(role.peers, flow);
    const int rows = chunk_size(chunk, role.tables.flows.to[flow], role.tables.chunks[ends.receiver]);
    const uint32_t before = atomicAdd(&counters_of(role.op).ready[counter], 1u);
    const bool is_early = has_bug(Bug::kEarlyRows, Kind::kDispatch);
    if (before + 1 != (is_early ? 1u : static_cast<uint32_t>(rows))) return;
    if (has_bug(Bug::kUnannouncedRows, Kind::kDispatch)) return;
    send_signal_of(role.op, role.p.offsets, role.peers, ends.receiver, HtSignal::kDispatchRows, ends.sender, chunk);
  }
  __device__ __forceinline__ static void count_staged(const SendRole& role, int index) {
    const int share = ht_rail_share(role.p.num_tokens);
    const uint32_t before = atomicAdd(&rail_counters_of(role.op).done[index], 1u);
    if (before + 1 != static_cast<uint32_t>(share) || has_bug(Bug::kLateChunks, Kind::kDispatch)) return;
    __threadfence();
    send_chunk(role, index / kHtRailChunks, index % kHtRailChunks, share);
  }
};

// An own token: the leading lane of a group acts for a rank of the own domain, or for all of another domain.
struct CrossingRoute : SendRoute {
  int domain = -1;  // of this lane, if it leads and the domain is another one
  int place = -1;   // of the row there; -1: it is not sent

  __device__ __forceinline__ static CrossingRoute of(const SendRole& role, int token) {
    const HtDispatchParams& p = role.p;
    const HtRail& rail = role.part.rail;
    CrossingRoute route;
    route.choice = OwnChoice::load(p.handle.own, p.shape.topk, token);
    route.resolve(role);
    if (!route.group.leads || rail.is_near(route.group.rank)) return route;
    route.domain = rail.domain_of(route.group.rank);
    int32_t* kept = p.handle.places + static_cast<int64_t>(token) * rail.num_domains + route.domain;
    if (sends_metadata(p.variant)) {
      *kept = static_cast<int32_t>(atomicAdd(&rail_counters_of(role.op).places[route.domain], 1u));
    }
    const int32_t place = *kept;
    if (place >= 0 && place < p.num_tokens) route.place = place;  // else the handle was changed
    return route;
  }
  __device__ __forceinline__ bool sends(const SendRole& role) const {
    if (domain >= 0) return place >= 0;
    return group.leads && first_row >= 0 && first_row < role.tables.rows[group.rank];
  }
  __device__ __forceinline__ Offset entry(const SendRole& role) const {
    const HtRail& rail = role.part.rail;
    return rail.out_part(domain) + rail.entry_at(ht_rail_share(role.p.num_tokens), place);
  }
  __device__ __forceinline__ char* target(const SendRole& role, int part) const {
    if (domain < 0) return target_of(role, *this, part);
    return role.peers.local<char>(entry(role) + role.p.offsets.row.offset[part]);
  }
  __device__ __forceinline__ int counter(const SendRole& role) const {
    if (!group.leads) return -1;
    if (domain < 0) return CrossingCounts::of_flow(role, group.rank, group.rank, choice.slot);
    const int share = ht_rail_share(role.p.num_tokens);
    return place < 0 ? -1 : kFlowCounters + domain * kHtRailChunks + place / share;
  }
  // What the rail peers must know of the token.
  __device__ __forceinline__ void store_routes(const SendRole& role, int token) const {
    const HtDispatchParams& p = role.p;
    const HtRouteFormat& format = p.offsets.route;
    float weight = 1.0f;
    if (role.lane < p.shape.topk && p.topk_weights != nullptr) {
      weight = p.topk_weights[static_cast<int64_t>(token) * p.shape.topk + role.lane];
    }
    unsigned rest = __ballot_sync(~0u, domain >= 0 && place >= 0);
#pragma unroll 1
    for (; rest != 0; rest &= rest - 1) {
      const int leader = __ffs(static_cast<int>(rest)) - 1;
      const unsigned long long mine = domain >= 0 && place >= 0 ? entry(role) + role.part.rail.route_at : 0;
      auto* words = role.peers.local<int32_t>(__shfl_sync(~0u, mine, leader));
      const bool is_there = group.rank == __shfl_sync(~0u, group.rank, leader);  // a leader's is a rank
      if (role.lane == 0) words[format.token()] = token;
      if (role.lane >= p.shape.topk) continue;
      words[format.expert(role.lane)] = is_there ? choice.id : -1;
      words[format.row(role.lane)] = choice.row;
      words[format.slot(role.lane)] = choice.slot;
      words[format.weight(role.lane)] = static_cast<int32_t>(__float_as_uint(weight));
    }
  }
};

// Chunks that are not full, when all rows lie in the staging. A warp.
__device__ __forceinline__ void send_rest(const SendRole& role) {
  const HtRail& rail = role.part.rail;
  const int others = rail.others(), share = ht_rail_share(role.p.num_tokens);
#pragma unroll 1
  for (int i = role.lane; i < others * kHtRailChunks; i += 32) {
    const int domain = rail.other(i % others), chunk = i / others;
    const auto rows =
        static_cast<int>(ptx::ld_relaxed_gpu(&rail_counters_of(role.op).done[domain * kHtRailChunks + chunk]));
    if (rows < share || has_bug(Bug::kLateChunks, Kind::kDispatch)) send_chunk(role, domain, chunk, rows);
  }
  __syncwarp();
}

template <bool kQuant>
__device__ __forceinline__ void send_own_rows(const SendRole& role, uint32_t& parity) {
  const HtDispatchParams& p = role.p;
  AnnouncementsOf<CrossingCounts> announcements;
  Tickets tickets;
  tickets.prefetch(counters_of(role.op).taken);
  int token = tickets.next(), done = 0;
#pragma unroll 1
  while (token < p.num_tokens) {
    testing_point(Point::kBetweenRows, role.op, token);
    tickets.prefetch(counters_of(role.op).taken);
    int bulk = begin_load(role, token, 0);
    const CrossingRoute route = CrossingRoute::of(role, token);
    route.store_routes(role, token);
#pragma unroll 1
    for (int pass = 0;;) {
      finish_load<kQuant>(role, token, pass, bulk, parity);
      store_parts(role, pass, route.sends(role), [&](int part) { return route.target(role, part); });
      if (++pass == role.geometry.passes) break;
      ptx::bulk_wait_read<0>();
      bulk = begin_load(role, token, pass);
    }
    if (announcements.is_full()) {
      ptx::bulk_wait<1>();
      announcements.send(role);
    }
    ptx::bulk_wait_read<0>();
    announcements.add(role, route);
    token = tickets.next();
    done++;
  }
  ptx::bulk_wait<0>();
  if (done > 0) stamp(Stamp::kLastMade, role.peers.rank);
  if (announcements.size > 0) announcements.send(role);
  const bool has_none = p.num_tokens == 0 && role.is_first() && role.warp == 0;
  if (done == 0 && !has_none) return;
  const uint32_t before = count_finished(counters_of(role.op).finished, done);
  if (before + done == static_cast<uint32_t>(p.num_tokens)) send_rest(role);
}

}  // namespace EP_KERNELS
}  // namespace ep
