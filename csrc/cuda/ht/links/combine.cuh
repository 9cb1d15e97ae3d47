// Combine over several domains. The ranks of a domain make their rows of another domain's tokens readable for the home
// rank's rail peer among them. It pulls and adds them in rank order, rounds the sum to the wire dtype, and puts it
// home, chunk by chunk, at the place that the token's row has had in the dispatch. For its own tokens a rank does the
// same, but keeps the sum. Then home ranks add the domains in order.
#pragma once

#include "cuda/ht/combine/pull.cuh"
#include "cuda/ht/links/links.cuh"

namespace ep {
inline namespace EP_KERNELS {

// Rows here of tokens of the rail peer in a domain, or of the own tokens.
struct DomainRows {
  int tokens, share, rows;  // of the peer, of a chunk at most, that there are

  __device__ __forceinline__ static DomainRows of(const HtCombineRole& role, int domain) {
    const HtRail& rail = role.part.rail;
    if (domain == rail.domain) return {role.p.num_tokens, ht_rail_share(role.p.num_tokens), role.p.num_tokens};
    const uint32_t sent =
        await_message_word(role.op, role.p.offsets, role.peers, rail.peer(domain), OpHeader::kNumTokens);
    const auto tokens = static_cast<int>(min(sent, static_cast<uint32_t>(role.p.shape.max_tokens)));
    return {tokens, ht_rail_share(tokens), within(role.p.handle.rail_tokens[domain], tokens)};
  }
  __device__ __forceinline__ int rows_of(int chunk) const { return min(max(rows - chunk * share, 0), share); }
};

// ---- Weights of the home rank, by the first block

// To the rail peers, by the rows' places.
__device__ __forceinline__ void send_crossing_weights(const HtCombineRole& role) {
  const HtCombineParams& p = role.p;
  const HtRail& rail = role.part.rail;
  const int topk = p.shape.topk, others = rail.others();
#pragma unroll 1
  for (int i = role.thread(); i < p.num_tokens * others; i += role.threads()) {
    const int token = i / others, domain = rail.other(i - token * others);
    const int64_t first = static_cast<int64_t>(token) * topk;
    bool is_there = false;
    for (int k = 0; k < topk; k++) {
      const int id = p.handle.own.ids[first + k];
      is_there |= p.shape.valid(id) && rail.domain_of(role.geometry.by_local_experts.divide(id)) == domain;
    }
    const int place = is_there ? p.handle.places[static_cast<int64_t>(token) * rail.num_domains + domain] : -1;
    if (place < 0 || place >= p.num_tokens) continue;
    auto* marks = role.peers.local<uint32_t>(rail.weights_to(domain, place));
    for (int k = 0; k < topk; k++) {
      const bool is_skipped =
          p.home_topk_idx != nullptr && !p.shape.valid(load_id(p.home_topk_idx, p.is_idx64, first + k));
      marks[k] = static_cast<uint32_t>(is_skipped ? kNoRow : 0);
      marks[topk + k] = __float_as_uint(p.home_weights[first + k]);
    }
  }
  __syncthreads();
  if (role.thread() != 0) return;
  const uint64_t bytes = static_cast<uint64_t>(p.num_tokens) * rail.weight_bytes();
  for (int i = 0; i < others; i++) {
    const int domain = rail.other(i);
    post(role.op, role.part, domain, kWeightsChannel, rail.weights_from(rail.domain, 0), rail.weights_to(domain, 0),
         bytes);
  }
}

// Those of the rail peer in `domain` to the slots of its rows.
__device__ __forceinline__ void forward_weights(const HtCombineRole& role, int domain) {
  const HtCombineParams& p = role.p;
  const HtRail& rail = role.part.rail;
  const HtSlotFormat& format = p.offsets.slot;
  const int topk = p.shape.topk, rows = DomainRows::of(role, domain).rows;
  const int64_t first = static_cast<int64_t>(domain) * p.shape.max_tokens * topk;
#pragma unroll 1
  for (int i = role.thread(); i < rows * topk; i += role.threads()) {
    const int place = i / topk, k = i - place * topk;
    const int id = p.handle.rail.ids[first + i], slot = p.handle.rail.slots[first + i];
    const int rank = p.shape.valid(id) ? role.geometry.by_local_experts.divide(id) : -1;
    if (rank < 0 || !rail.is_near(rank)) continue;
    if (!role.tables.flows.has_slot(FlowEnds::number(role.peers, domain, rank), slot)) continue;
    const auto* marks = role.peers.local<uint32_t>(rail.weights_from(domain, place));
    auto* words = role.peers.at<uint32_t>(rank, p.offsets.slot_words(slot));
    ptx::st_relaxed_sys(words + format.place(k), ptx::ld_relaxed_sys(marks + k));
    ptx::st_relaxed_sys(words + format.weight(k), ptx::ld_relaxed_sys(marks + topk + k));
  }
  __syncthreads();
  for (int lsa = role.thread(); lsa < rail.domain_size; lsa += role.threads()) {
    send_signal_of(role.op, p.offsets, role.peers, rail.near_rank(lsa), HtSignal::kCombineWeights, rail.peer(domain),
                   0);
  }
}

// All threads of the first block: what the rail peers wait for and need no sums for.
__device__ __forceinline__ void begin_crossing(const HtCombineRole& role) {
  const HtRail& rail = role.part.rail;
  const int others = rail.others();
#pragma unroll 1
  for (int i = role.thread(); i < others * kHtRailChunks; i += role.threads()) {
    const int domain = rail.other(i % others), chunk = i / others;
    if (DomainRows::of(role, domain).rows_of(chunk) > 0) continue;
    post(role.op, role.part, domain, kFirstChunkChannel + chunk, 0, 0, 0);
  }
  __syncwarp();
  if (role.p.options.weighting != Weighting::kHome || !role.p.has_rows()) {
    return post_nothing(role.op, role.part, kWeightsChannel, 1, role.thread(), role.threads());
  }
  send_crossing_weights(role);
#pragma unroll 1
  for (int i = 0; i < others; i++) {
    const int domain = rail.other(i);
    bool ok = true;
    if (role.thread() == 0) ok = await_channel(role.op, role.part, domain, kWeightsChannel);
    __syncwarp();
    if (__syncthreads_or(!ok)) return;
    forward_weights(role, domain);
  }
}

// ---- Sums of the domain

// Units in the order (chunk, domain, row, part) of the others' tokens, then (token, part) of the own ones.
struct DomainUnits {
  int others, most, parts;  // most: rows of a chunk
  int rail_units, units;

  __device__ __forceinline__ static DomainUnits of(const HtCombineRole& role) {
    const HtRail& rail = role.part.rail;
    DomainUnits found{rail.others(), 0, static_cast<int>(role.geometry.by_parts.divisor), 0, 0};
#pragma unroll 1
    for (int i = 0; i < found.others; i++) found.most = max(found.most, DomainRows::of(role, rail.other(i)).share);
    found.rail_units = kHtRailChunks * found.others * found.most * found.parts;
    found.units = found.rail_units + role.geometry.units;
    return found;
  }
};

// Some pieces of a token's rows in this domain, in the order of ranks. A chunk that is complete goes home.
template <DType kIn, DType kWire, DType kOut, int kLaneCount>
struct DomainSums : PulledRows<kIn, kWire, kOut, kLaneCount> {
  using Base = PulledRows<kIn, kWire, kOut, kLaneCount>;
  using Base::role, Base::tickets, Base::next_unit, Base::next, Base::pieces, Base::rows, Base::in_place, Base::source,
      Base::put_token, Base::nothing_of, Base::kFailed, Base::kSteps, Base::kCount;

  const DomainUnits all;
  int taken = 0;                        // units, those without a row too
  int domain = 0, place = 0, part = 0;  // of the next unit
  OfUnits<unsigned long long> targets;
  OfUnits<int> counters;

  __device__ __forceinline__ explicit DomainSums(const HtCombineRole& a_role)
      : Base(a_role, typename Base::NoUnits{}), all(DomainUnits::of(a_role)) {
    tickets.prefetch(rail_counters_of(role.op).taken);
    prefetch_next();
  }
  // The next unit that has a row.
  __device__ __forceinline__ void prefetch_next() {
    const HtCombineParams& p = role.p;
    const HtRail& rail = role.part.rail;
#pragma unroll 1
    while (true) {
      next_unit = tickets.next();
      if (next_unit >= all.units) return;
      tickets.prefetch(rail_counters_of(role.op).taken);
      taken++;
      if (next_unit >= all.rail_units) {
        const int own = next_unit - all.rail_units;
        domain = rail.domain;
        place = role.geometry.by_parts.divide(own);
        part = role.geometry.by_parts.remainder(own, place);
        next = OwnChoice::load(p.handle.own, p.shape.topk, place);
        return;
      }
      const int row = next_unit / all.parts, number = row / all.most, index = row - number * all.most;
      const int chunk = number / all.others;
      domain = rail.other(number - chunk * all.others);
      const DomainRows here = DomainRows::of(role, domain);
      if (index >= here.rows_of(chunk)) continue;
      place = chunk * here.share + index;
      part = next_unit - row * all.parts;
      const int64_t first = static_cast<int64_t>(domain) * p.shape.max_tokens * p.shape.topk;
      const HtRoutes& routes = p.handle.rail;
      next = OwnChoice::load({routes.ids + first, routes.rows + first, routes.slots + first}, p.shape.topk, place);
      return;
    }
  }
  __device__ __forceinline__ PullRoute route() const {
    const HtCombineParams& p = role.p;
    PullRoute found;
    found.choice = next;
    int rank = p.shape.valid(next.id) ? role.geometry.by_local_experts.divide(next.id) : -1;
    if (rank >= 0 && role.part.rail.is_near(rank)) {
      found.flow = FlowEnds::number(role.peers, domain, rank);
      if (!role.tables.flows.has_slot(found.flow, next.slot)) rank = -1;  // of a handle that was changed
    } else {
      rank = -1;
    }
    found.group = SameOwner::among(rank, role.geometry.rank_bits);
    return found;
  }
  __device__ __forceinline__ bool await() {
    if (next_unit >= all.units) return false;
    const bool ok = route().await(role);
    if (!ok) next_unit = kFailed;
    return ok;
  }
  __device__ __forceinline__ bool turn(unsigned unit) {
    const HtCombineParams& p = role.p;
    const HtRail& rail = role.part.rail;
    const HtCombineGeometry& g = role.geometry;
    if (next_unit >= all.units) return false;
    PullRoute found = route();
    if (!found.is_ready(role)) return false;
    found.resolve(role);
    pieces.first = part * g.unit_pieces;
    pieces.end = min(pieces.first + g.unit_pieces, g.pieces);
    const int share = DomainRows::of(role, domain).share;
    const bool is_own = domain == rail.domain;
    char* target = role.peers.template local<char>((is_own ? rail.in_part(domain) : rail.out_part(domain)) +
                                                   rail.entry_at(share, place));
    if (p.has_values && part == 0) keep_values(found, target);
    const unsigned present = __ballot_sync(~0u, found.source != nullptr);
    rows.put(unit, present);
    // A rank that has dropped all rows of the token counts with +0.
    const bool has_all = __popc(present) == found.num_ranks;
    put_token(unit, 0, !has_all || present == 0);
    if (kIn != kWire) in_place.put(unit, __ballot_sync(~0u, found.is_in_place));
    targets.put(unit, reinterpret_cast<unsigned long long>(target));
    counters.put(unit, domain * kHtRailChunks + place / share);
    source = found.source;
    prefetch_next();
    return true;
  }
  __device__ __forceinline__ void keep_values(const PullRoute& found, char* target) const {
    if (role.lane >= role.p.shape.topk) return;
    uint32_t bits = 0;
    if (found.group.rank >= 0) {
      const char* staged = role.staged(found.group.rank, found.choice.slot, role.values_part());
      bits = ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t*>(staged) + role.lane);
    }
    reinterpret_cast<uint32_t*>(target + role.p.offsets.row.offset[role.values_part()])[role.lane] = bits;
  }
  __device__ __forceinline__ void begin(unsigned unit, int, float (&sum)[kSteps][kCount]) const {
    fill(sum, nothing_of(unit));
  }
  __device__ __forceinline__ void store(unsigned unit, int piece, const float (&sum)[kSteps][kCount]) const {
    if (!role.p.has_rows()) return;
    store_sum<kWire>(reinterpret_cast<char*>(targets.get(unit)), role.p.hidden, piece, role.rest(piece), sum);
  }
  __device__ __forceinline__ void finish(unsigned unit) const {
    const int counter = counters.get(unit);
    if (counter / kHtRailChunks != role.part.rail.domain) stamp(Stamp::kLastMade, role.peers.rank);
    __syncwarp();
    if (role.lane == 0) count(counter);
    __syncwarp();
  }
  // One lane.
  __device__ __forceinline__ void count(int counter) const {
    __threadfence();
    const uint32_t before = atomicAdd(&rail_counters_of(role.op).done[counter], 1u);
    const int of_domain = counter / kHtRailChunks, chunk = counter % kHtRailChunks;
    if (of_domain == role.part.rail.domain) return;
    const DomainRows here = DomainRows::of(role, of_domain);
    const int count = here.rows_of(chunk);
    if (before + 1 != static_cast<uint32_t>(count * all.parts) || has_bug(Bug::kLateChunks, Kind::kCombine)) return;
    __threadfence();
    send_sums(of_domain, chunk, here.share, count);
  }
  // One lane.
  __device__ __forceinline__ void send_sums(int of_domain, int chunk, int share, int count) const {
    const HtRail& rail = role.part.rail;
    const uint64_t at = rail.chunk_at(share, chunk) + sizeof(HtRailHeader);  // sums have no header
    const Offset out = rail.out_part(of_domain) + at;
    post(role.op, role.part, of_domain, kFirstChunkChannel + chunk, rail.in_part(rail.domain) + at, out,
         static_cast<uint64_t>(count) * rail.entry_bytes);
    stamp_put(role.op);
    if (has_bug(Bug::kEarlySource, Kind::kCombine)) *role.peers.template local<uint32_t>(out) ^= 0x55;
  }
  // All of them, where none was sent before. A warp, when all warps have finished.
  __device__ __forceinline__ void send_late() const {
    const HtRail& rail = role.part.rail;
#pragma unroll 1
    for (int i = role.lane; i < rail.others() * kHtRailChunks; i += 32) {
      const int of_domain = rail.other(i % rail.others()), chunk = i / rail.others();
      const DomainRows here = DomainRows::of(role, of_domain);
      if (here.rows_of(chunk) > 0) send_sums(of_domain, chunk, here.share, here.rows_of(chunk));
    }
    __syncwarp();
  }
};

// ---- Home

// Some pieces of an own token's sums, in the order of domains. None is read as it was given, so kIn says nothing.
template <DType kWire, DType kOut, int kLaneCount, DType kIn = kIsBlockFormat<kWire> ? kOut : kWire>
struct HomeSums : PulledRows<kIn, kWire, kOut, kLaneCount> {
  using Base = PulledRows<kIn, kWire, kOut, kLaneCount>;
  using Base::role, Base::next_unit, Base::next, Base::pieces, Base::rows, Base::put_token, Base::source, Base::kFailed;

  // Chunks that are known to have come, a bit each: in lane i of domains i and, in the upper half, i + 32. Of further
  // domains the network is asked each time.
  uint32_t known = 0;

  __device__ __forceinline__ explicit HomeSums(const HtCombineRole& a_role) : Base(a_role) {}

  // A choice's domain, its chunk, and where the token's sum of the domain lies; one choice a lane.
  struct Sum {
    int domain = -1, chunk = 0;
    const char* entry = nullptr;
  };
  __device__ __forceinline__ Sum sum_of(int token) const {
    const HtCombineParams& p = role.p;
    const HtRail& rail = role.part.rail;
    Sum sum;
    if (!p.shape.valid(next.id)) return sum;
    const int domain = rail.domain_of(role.geometry.by_local_experts.divide(next.id));
    const bool is_own = domain == rail.domain;
    const int place = is_own ? token : p.handle.places[static_cast<int64_t>(token) * rail.num_domains + domain];
    if (place < 0 || place >= p.num_tokens) return sum;  // of a handle that was changed
    const int share = ht_rail_share(p.num_tokens);
    sum.domain = domain;
    sum.chunk = place / share;
    sum.entry = role.peers.template local<char>(rail.in_part(domain) + rail.entry_at(share, place));
    return sum;
  }
  __device__ __forceinline__ int token() const { return role.geometry.by_parts.divide(next_unit); }

  // Acquire, if true.
  __device__ __forceinline__ bool has_come(const Sum& sum) const {
    const HtRail& rail = role.part.rail;
    if (sum.domain != rail.domain) {
      if (has_bug(Bug::kSkippedWait, Kind::kCombine) && sum.chunk == 1) return true;
      const int word = rail.signal(bank_of(role.op.epoch), sum.domain, kFirstChunkChannel + sum.chunk);
      const int context = rail.context(kFirstChunkChannel + sum.chunk);
      return role.part.network().read_signal(context, word) >= HtRail::expected(role.op.epoch);
    }
    const int count =
        DomainRows::of(role, sum.domain).rows_of(sum.chunk) * static_cast<int>(role.geometry.by_parts.divisor);
    const uint32_t* done = &rail_counters_of(role.op).done[sum.domain * kHtRailChunks + sum.chunk];
    if (ptx::ld_relaxed_gpu(done) != static_cast<uint32_t>(count)) return false;
    __threadfence();
    return true;
  }
  __device__ __forceinline__ bool await_sum(const Sum& sum) const {
    WaitBudget budget;
    while (!has_come(sum)) {
      const bool is_own = sum.domain == role.part.rail.domain;
      const int peer = is_own ? role.peers.rank : role.part.rail.peer(sum.domain);
      if (budget.is_spent(role.op, Awaited::kRail, peer, HtRail::expected(role.op.epoch), 0)) return false;
    }
    return true;
  }
  // Whether all sums of the token have come; `waits`: until they have, or the wait is given up.
  __device__ __forceinline__ bool is_ready(const Sum& sum, bool waits) {
    const int holder = sum.domain >= 0 ? sum.domain % 32 : 0, shift = sum.domain >= 32 ? 16 : 0;
    const bool is_known = (__shfl_sync(~0u, known, holder) >> (shift + sum.chunk) & 1) != 0 && sum.domain < 64;
    const bool asks = sum.domain >= 0 && !is_known;
    bool ok = !asks || (waits ? await_sum(sum) : has_come(sum));
    unsigned found = __ballot_sync(~0u, asks && ok);
#pragma unroll 1
    for (; found != 0; found &= found - 1) {
      const int lane = __ffs(static_cast<int>(found)) - 1;
      const int domain = __shfl_sync(~0u, sum.domain, lane), chunk = __shfl_sync(~0u, sum.chunk, lane);
      if (domain != role.part.rail.domain) stamp(Stamp::kLastArrival, role.peers.rank);
      if (role.lane == domain % 32 && domain < 64) known |= 1u << (chunk + (domain >= 32 ? 16 : 0));
    }
    ok = __all_sync(~0u, ok) != 0;
    __syncwarp();
    return ok;
  }
  __device__ __forceinline__ bool await() {
    if (next_unit >= role.geometry.units) return false;
    const bool ok = is_ready(sum_of(token()), true);
    if (!ok) next_unit = kFailed;
    return ok;
  }
  __device__ __forceinline__ bool turn(unsigned unit) {
    const HtCombineParams& p = role.p;
    const HtCombineGeometry& g = role.geometry;
    if (next_unit >= g.units) return false;
    const int own = token(), part = g.by_parts.remainder(next_unit, own);
    const Sum sum = sum_of(own);
    if (!is_ready(sum, false)) return false;
    if (sum.domain >= 0 && sum.domain != role.part.rail.domain) {
      stamp_lane(Stamp::kFirstUsed, role.peers.rank, true);
    }
    pieces.first = part * g.unit_pieces;
    pieces.end = min(pieces.first + g.unit_pieces, g.pieces);
    if (p.has_values && part == 0 && role.lane < p.shape.topk) {
      uint32_t bits = 0;
      if (sum.entry != nullptr) {
        const char* values = sum.entry + p.offsets.row.offset[role.values_part()];
        bits = ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t*>(values) + role.lane);
      }
      p.out_values[static_cast<int64_t>(own) * p.shape.topk + role.lane] = __uint_as_float(bits);
    }
    LaneRanks domains = LaneRanks::of(p.has_rows() ? sum.domain : -1);
    int count = 0;
    source = nullptr;
    // From the choices' lanes to the order of domains.
#pragma unroll 1
    for (; domains.has_more(role.part.rail.num_domains); count++) {
      const int domain = domains.take();
      const int holder = __ffs(static_cast<int>(__ballot_sync(~0u, sum.domain == domain))) - 1;
      const auto found = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(sum.entry), holder);
      if (role.lane == count) source = reinterpret_cast<const char*>(found);
    }
    rows.put(unit, __ballot_sync(~0u, source != nullptr));
    put_token(unit, own, count == 0 && !begins_with_bias(p));
    Base::prefetch_next();
    return true;
  }
};

// ---- A worker

template <DType kIn, DType kWire, DType kOut, int kCount>
__device__ __forceinline__ void add_up_domains(const HtCombineRole& role, char* rings) {
  testing_point(Point::kBeforeReceive, role.op);
  {
    using Sums = DomainSums<kIn, kWire, kOut, kCount>;
    Sums sums(role);
    RowStream<Sums> stream{sums, CopyRing(role.ring(rings))};
    stream.run();
    if (sums.next_unit == Sums::kFailed) return;
    testing_point(Point::kBeforeReset, role.op);
    // The last warp to have read tells the ranks of the domain: their rows belong to them again.
    const uint32_t before = sums.taken > 0 ? count_finished(rail_counters_of(role.op).finished, sums.taken) : ~0u;
    if (sums.taken > 0 && before + sums.taken == static_cast<uint32_t>(sums.all.units)) {
      if (has_bug(Bug::kLateChunks, Kind::kCombine)) sums.send_late();
      const NearRanks near = NearRanks::of(role.peers, role.num_ranks());
#pragma unroll 1
      for (int peer = near.first + role.lane; peer < near.end(); peer += 32) {
        send_signal(role.op, role.p.offsets, role.peers, peer, HtSignal::kCombineDone, 0);
      }
    }
  }
  using Home = HomeSums<kWire, kOut, kCount>;
  Home home(role);
  RowStream<Home> stream{home, CopyRing(role.ring(rings))};
  stream.run();
}

}  // namespace EP_KERNELS
}  // namespace ep
