// How a rank hands out what its rail peers have sent: row by row, chunk by chunk as they come, to the places that the
// senders have worked out. It stores what the senders would have stored themselves, rows, metadata and signals, so that
// receivers need not know.
#pragma once

#include "cuda/ht/links/send.cuh"

namespace ep {
inline namespace EP_KERNELS {

// A row that has come: the leading lane of a group acts for its rank.
struct ForwardedRoute {
  OwnChoice choice;
  uint32_t weight = 0;
  int32_t token = 0;
  SameOwner group;
  int32_t first_row = kNoRow;
  int flow = 0;

  __device__ __forceinline__ static ForwardedRoute load(const SendRole& role, int domain, const char* entry) {
    const HtDispatchParams& p = role.p;
    const HtRouteFormat& format = p.offsets.route;
    const auto* words = reinterpret_cast<const uint32_t*>(entry + role.part.rail.route_at);
    const auto word = [&](int index) { return static_cast<int32_t>(ptx::ld_relaxed_sys(words + index)); };
    ForwardedRoute route;
    route.token = word(format.token());
    if (role.lane < p.shape.topk) {
      route.choice = {word(format.expert(role.lane)), word(format.row(role.lane)), word(format.slot(role.lane))};
      route.weight = static_cast<uint32_t>(word(format.weight(role.lane)));
    }
    int rank = p.shape.valid(route.choice.id) ? role.geometry.by_local_experts.divide(route.choice.id) : -1;
    if (rank >= 0 && role.part.rail.is_near(rank)) {
      route.flow = FlowEnds::number(role.peers, domain, rank);
      if (!role.tables.flows.has_slot(route.flow, route.choice.slot)) rank = -1;  // of a handle that was changed
    } else {
      rank = -1;
    }
    route.group = SameOwner::among(rank, role.geometry.rank_bits);
    route.first_row = route.group.first_fitting(route.choice.row);
    return route;
  }
  __device__ __forceinline__ bool sends(const SendRole& role) const {
    return group.leads && first_row >= 0 && first_row < role.tables.rows[group.rank];
  }
  __device__ __forceinline__ char* target(const SendRole& role, int part) const {
    return target_at(role, group.rank, choice.slot, first_row, part);
  }
  __device__ __forceinline__ int counter(const SendRole& role) const {
    return group.leads ? CrossingCounts::of_flow(role, flow, group.rank, choice.slot) : -1;
  }
  // To the slots at the receivers, and to the handle for combine.
  __device__ __forceinline__ void store_metadata(const SendRole& role, int domain, int place) const {
    const HtDispatchParams& p = role.p;
    const HtSlotFormat& format = p.offsets.slot;
    const int topk = p.shape.topk, lane = role.lane;
    if (lane < topk) {
      const int64_t kept = (static_cast<int64_t>(domain) * p.shape.max_tokens + place) * topk + lane;
      p.handle.rail.ids[kept] = choice.id;
      p.handle.rail.rows[kept] = choice.row;
      p.handle.rail.slots[kept] = choice.slot;
    }
    unsigned rest = __ballot_sync(~0u, group.leads);
#pragma unroll 1
    for (; rest != 0; rest &= rest - 1) {
      const int leader = __ffs(static_cast<int>(rest)) - 1;
      const int peer = __shfl_sync(~0u, group.rank, leader);
      const int32_t slot = __shfl_sync(~0u, choice.slot, leader);
      const bool expert_rows = has_expert_rows(static_cast<OutputLayout>(role.tables.layout[peer]));
      auto* out = role.peers.at<uint32_t>(peer, p.offsets.slot_words(slot));
      if (lane == 0) ptx::st_relaxed_sys(out + format.token(), static_cast<uint32_t>(token));
      if (lane >= topk) continue;
      const bool is_there = group.rank == peer;
      const int32_t there = expert_rows ? choice.row : choice.id - peer * p.shape.local_experts();
      ptx::st_relaxed_sys(out + format.place(lane), static_cast<uint32_t>(is_there ? there : kNoRow));
      ptx::st_relaxed_sys(out + format.weight(lane), is_there ? weight : 0u);
    }
  }
};

// Loads a pass of an entry's parts into the stage. All of them lie on multiples of 16 bytes.
__device__ __forceinline__ void load_entry(const SendRole& role, const char* entry, int pass, uint32_t& parity) {
  const HtDispatchParams& p = role.p;
  const HtSendGeometry& g = role.geometry;
  ptx::fence_proxy_async_shared();  // the last users of the stage may have been threads
  __syncwarp();
  if (role.lane == 0) {
    int bytes = 0;
    for (int i = g.first_part[pass]; i < g.first_part[pass + 1]; i++) bytes += align_up(p.parts[i].bytes, 16);
    ptx::mbarrier_expect(role.barrier(), bytes);
    for (int i = g.first_part[pass]; i < g.first_part[pass + 1]; i++) {
      ptx::bulk_load(role.stage + g.stage_offset[i], entry + p.offsets.row.offset[i], align_up(p.parts[i].bytes, 16),
                     role.barrier());
    }
  }
  await_load(role, parity);
  __syncwarp();
}

// A worker of a dispatch over several domains.
struct CrossingWorker {
  const SendRole& role;
  uint32_t parity = 0;
  int known = -1;  // chunks up to this one have come, in the order of units

  __device__ __forceinline__ explicit CrossingWorker(const SendRole& a_role) : role(a_role) {}

  __device__ __forceinline__ void begin() const {
    if (role.lane == 0) ptx::mbarrier_init(role.barrier(), 1);
    __syncwarp();
  }
  __device__ __forceinline__ void prefetch_route() const {}
  __device__ __forceinline__ void drop() const {}

  // Some workers of a block begin with what comes, so that it is handed out while own rows still go.
  template <bool kQuant>
  __device__ __forceinline__ void run() {
    testing_point(Point::kBeforeRows, role.op);
    ptx::fence_proxy_async();  // threads acquired the peers' op messages, bulk copies write to the peers' memory
    if (role.warp < ceil_div(role.plan.workers_of(role.at.block), 2)) send_own_rows<kQuant>(role, parity);
    forward();
  }

  __device__ __forceinline__ int tokens_of(int domain) const {
    const uint32_t tokens =
        await_message_word(role.op, role.p.offsets, role.peers, role.part.rail.peer(domain), OpHeader::kNumTokens);
    return static_cast<int>(min(tokens, static_cast<uint32_t>(role.p.shape.max_tokens)));
  }

  // Acquire, once for a chunk. Bulk copies will read what the network has written.
  __device__ __forceinline__ bool await_chunk(AnnouncementsOf<CrossingCounts>& announcements, int number, int domain,
                                              int chunk) {
    if (number <= known) return true;
    if (announcements.size > 0) {  // nobody waits for them longer than for this chunk
      ptx::bulk_wait<0>();
      announcements.send(role);
    }
    if (!warp_awaits_channel(role.op, role.part, domain, kFirstChunkChannel + chunk)) return false;
    known = number;
    stamp(Stamp::kLastArrival, role.peers.rank);
    ptx::fence_proxy_async();
    return true;
  }

  __device__ __forceinline__ void forward() {
    const HtRail& rail = role.part.rail;
    const int others = rail.others();
    int most = 0;  // rows of a chunk
#pragma unroll 1
    for (int i = 0; i < others; i++) most = max(most, ht_rail_share(tokens_of(rail.other(i))));
    AnnouncementsOf<CrossingCounts> announcements;
    Tickets tickets;
    uint32_t& counter = rail_counters_of(role.op).taken;
    tickets.prefetch(counter);
    int unit = tickets.next();
#pragma unroll 1
    while (unit < kHtRailChunks * others * most) {
      tickets.prefetch(counter);
      const int number = unit / most, index = unit - number * most, chunk = number / others;
      const int domain = rail.other(number - chunk * others);
      if (!await_chunk(announcements, number, domain, chunk)) break;
      if (forward_row(announcements, domain, chunk, index)) testing_point(Point::kBetweenRows, role.op, unit);
      unit = tickets.next();
    }
    ptx::bulk_wait<0>();
    if (announcements.size > 0) announcements.send(role);
  }

  // False: the chunk has no such row.
  __device__ __forceinline__ bool forward_row(AnnouncementsOf<CrossingCounts>& announcements, int domain, int chunk,
                                              int index) {
    const HtDispatchParams& p = role.p;
    const HtRail& rail = role.part.rail;
    const int tokens = tokens_of(domain), share = ht_rail_share(tokens);
    const bool keeps = sends_metadata(p.variant);
    if (keeps && tokens == 0 && chunk == 0 && index == 0 && role.lane == 0) p.handle.rail_tokens[domain] = 0;
    if (chunk * share >= tokens) return false;
    const Offset part = rail.in_part(domain);
    const auto* header = role.peers.local<uint32_t>(part + rail.chunk_at(share, chunk));
    const auto rows = static_cast<int>(ptx::ld_relaxed_sys(header)),
               all = static_cast<int>(ptx::ld_relaxed_sys(header + 1));
    const bool is_last = chunk == (tokens - 1) / share;
    if (keeps && is_last && index == 0 && role.lane == 0) p.handle.rail_tokens[domain] = within(all, tokens);
    if (index >= min(rows, share) || index + chunk * share >= tokens) return false;
    if (has_bug(Bug::kSkippedChunk, Kind::kDispatch) && chunk == 1) return false;
    const int place = chunk * share + index;
    const char* entry = role.peers.local<char>(part + rail.entry_at(share, place));
    const ForwardedRoute route = ForwardedRoute::load(role, domain, entry);
    if (keeps) route.store_metadata(role, domain, place);
#pragma unroll 1
    for (int pass = 0; pass < role.geometry.passes; pass++) {
      load_entry(role, entry, pass, parity);
      store_parts(role, pass, route.sends(role), [&](int i) { return route.target(role, i); });
      if (pass + 1 < role.geometry.passes) ptx::bulk_wait_read<0>();
    }
    stamp_lane(Stamp::kFirstUsed, role.peers.rank, true);
    if (announcements.is_full()) {
      ptx::bulk_wait<1>();
      announcements.send(role);
    }
    ptx::bulk_wait_read<0>();
    announcements.add(role, route);
    return true;
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
