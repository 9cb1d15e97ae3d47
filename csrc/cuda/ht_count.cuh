// How a block of the routing kernel counts: the first one all own tokens, the others those before their share. Ids are
// read as they lie in memory, several bytes a lane, and a token's ranks are looked at when all of its tile lie in
// shared memory.
#pragma once

#include <type_traits>

#include "cuda/ht_call.cuh"

namespace ep {

// What a block keeps in shared memory.
struct RouteTables {
  int* rows;                                           // [R] of the tokens counted here, those for each rank
  int* first_slot;                                     // [R] of this rank's rows at each receiver
  int *from, *layout, *capacity, *alignment, *tokens;  // [R], one after the other: what each rank's message tells
  int* choices;                                        // [E + 1] of the tokens counted here; last: of no expert
  int *start, *index, *demand;    // [E] first row of each expert at its owner; choices of ranks before; of all
  int *total, *dropped;           // rows received here
  int *warp_rows, *warp_choices;  // [place_warps][R], [E]: counts, then numbers before each warp's tokens
  int* lane_choices;              // [E + 1][copies]
  uint8_t* tile;                  // [tile_tokens, K] the rank of each choice; R: none; R <= 8: its bit
  int *ids, *choice_numbers, *token_numbers;  // [chunk_tokens, K] of the share; maybe in the handle

  static constexpr int kTold = 5;  // tables from `from` on

  __device__ static RouteTables of(char* shared, const HtRouteParams& p, const HtRouteGeometry& g, int chunk_begin) {
    SharedTables tables{shared};
    const auto take = [&](int count) { return tables.take<int>(count); };
    const int ranks = p.shape.num_ranks, experts = p.shape.num_experts;
    RouteTables t;
    t.rows = take(ranks);
    t.first_slot = take(ranks);
    t.from = take(ranks);
    t.layout = take(ranks);
    t.capacity = take(ranks);
    t.alignment = take(ranks);
    t.tokens = take(ranks);
    t.choices = take(experts + 1);
    t.start = take(experts);
    t.index = take(experts);
    t.demand = take(experts);
    t.total = take(1);
    t.dropped = take(1);
    tables.next = shared + g.work_at;
    t.lane_choices = g.copies_log == 0 ? t.choices : reinterpret_cast<int*>(tables.next);
    t.warp_rows = take(g.place_warps * ranks);
    t.warp_choices = take(g.place_warps * experts);
    t.tile = reinterpret_cast<uint8_t*>(shared + g.tile_at);
    const int64_t first = static_cast<int64_t>(chunk_begin) * p.shape.topk;
    const int size = g.chunk_tokens * p.shape.topk;
    tables.next = shared + g.share_at;
    t.ids = g.keeps_share ? take(size) : p.handle.own.ids + first;
    t.choice_numbers = g.keeps_share ? take(size) : p.handle.own.rows + first;
    t.token_numbers = g.keeps_share ? take(size) : p.handle.own.slots + first;
    return t;
  }
};

struct RouteRole : HtBlock {
  const HtRouteParams& p;
  const HtRouteGeometry& geometry;
  const LsaPeers& peers;
  const CallContext& call;
  RouteTables tables;

  __device__ int num_ranks() const { return p.shape.num_ranks; }
  __device__ int num_experts() const { return p.shape.num_experts; }
  __device__ int chunk_begin() const { return min(p.num_tokens, at.block * geometry.chunk_tokens); }
  __device__ int chunk_end() const { return min(p.num_tokens, (at.block + 1) * geometry.chunk_tokens); }
  __device__ int chunk_choices() const { return (chunk_end() - chunk_begin()) * p.shape.topk; }
  // Who has no share needs no counts.
  __device__ int counted_tokens() const {
    if (is_first()) return p.num_tokens;
    return chunk_begin() < chunk_end() ? chunk_begin() : 0;
  }
  // The last block writes down what all learn; the first has told the other ranks.
  __device__ bool records() const { return at.block == at.num_blocks - 1; }
};

// Ids of consecutive choices, as many as a thread asks for at once: int64 or int32 of 16 bytes, or one of either type.
enum class Ids { kPairs, kQuads, kSingles };

template <Ids kIds>
struct RawIds {
  static constexpr int kCount = kIds == Ids::kPairs ? 2 : kIds == Ids::kQuads ? 4 : 1;

  __device__ __forceinline__ static uint4 load(const char* ids, int i, bool is_idx64) {
    if constexpr (kIds == Ids::kSingles) {
      const RawId id = RawId::load(ids, is_idx64, i);
      return make_uint4(id.low, id.high, 0, 0);
    } else {
      return ptx::ld_nc(ids + i * static_cast<int64_t>(16));
    }
  }
  // The q-th id; `limit` for all that are none below it.
  __device__ __forceinline__ static uint32_t below(uint4 raw, int q, uint32_t limit, bool is_idx64) {
    if constexpr (kIds == Ids::kQuads) return min(q == 0 ? raw.x : q == 1 ? raw.y : q == 2 ? raw.z : raw.w, limit);
    const uint32_t low = q == 0 ? raw.x : raw.z, high = q == 0 ? raw.y : raw.w;
    return (kIds == Ids::kPairs || is_idx64) && high != 0 ? limit : min(low, limit);
  }
};

// What a counting thread has asked for: loads are on their way while others are looked at.
struct Ahead {
  static constexpr int kLoads = 4;
  uint4 raw[kLoads];
};

// Loads that the counting threads share. The first warp does not count: in the first block it tells the other ranks
// that this one has come, which takes as long as the first loads.
template <Ids kIds>
struct Loads {
  const char* ids;
  int count;  // of loads, at least 1
  int thread, threads;
  bool is_idx64;

  __device__ static Loads of(const RouteRole& role, int64_t first, int choices) {
    const auto* ids = static_cast<const char*>(role.p.topk_idx) + (first << (role.p.is_idx64 ? 3 : 2));
    return {ids, choices / RawIds<kIds>::kCount, role.thread() - 32, role.threads() - 32, role.p.is_idx64};
  }
  __device__ int rounds() const { return ceil_div(count, threads); }
  // Asked for without an alternative: a load under a condition is waited for where it stands.
  __device__ __forceinline__ uint4 ask(int round) const {
    return RawIds<kIds>::load(ids, min(thread + round * threads, count - 1), is_idx64);
  }
  __device__ __forceinline__ void ask_first(Ahead& ahead) const {
#pragma unroll
    for (int q = 0; q < Ahead::kLoads; q++) ahead.raw[q] = ask(q);
  }
};

// One load's choices: how many of each expert, and the rank of each (kFew: its bit). `counters`: those of the lane.
template <Ids kIds, bool kFew>
__device__ __forceinline__ void count_load(const RouteRole& role, uint4 raw, int load, bool exists, char* counters) {
  using Raw = RawIds<kIds>;
  const uint32_t limit = role.num_experts();
  const int shift = 2 + role.geometry.copies_log;
  uint32_t bytes = 0;
#pragma unroll
  for (int k = 0; k < Raw::kCount; k++) {
    const uint32_t id = exists ? Raw::below(raw, k, limit, role.p.is_idx64) : limit;
    atomicAdd(reinterpret_cast<int*>(counters + (id << shift)), 1);
    const auto rank = static_cast<uint32_t>(role.geometry.by_local_experts.divide(static_cast<int>(id)));
    bytes |= (kFew ? 1u << rank & 0xFF : rank) << 8 * k;
  }
  if (!exists) return;
  uint8_t* place = role.tables.tile + load * Raw::kCount;
  if constexpr (Raw::kCount == 4) *reinterpret_cast<uint32_t*>(place) = bytes;
  if constexpr (Raw::kCount == 2) *reinterpret_cast<uint16_t*>(place) = static_cast<uint16_t>(bytes);
  if constexpr (Raw::kCount == 1) *place = static_cast<uint8_t>(bytes);
}

template <Ids kIds, bool kFew>
__device__ __forceinline__ void count_choices(const RouteRole& role, Ahead& ahead, const Loads<kIds>& loads) {
  const int own_copy = role.lane & ((1 << role.geometry.copies_log) - 1), rounds = loads.rounds();
  auto* counters = reinterpret_cast<char*>(role.tables.lane_choices + own_copy);
  int round = 0, load = loads.thread;
  // All rounds but the last are complete.
#pragma unroll 1
  for (; round + Ahead::kLoads < rounds; round += Ahead::kLoads) {
#pragma unroll
    for (int q = 0; q < Ahead::kLoads; q++) {
      count_load<kIds, kFew>(role, ahead.raw[q], load, true, counters);
      ahead.raw[q] = loads.ask(round + q + Ahead::kLoads);
      load += loads.threads;
    }
  }
#pragma unroll
  for (int q = 0; q < Ahead::kLoads; q++) {
    if (round + q >= rounds) break;
    count_load<kIds, kFew>(role, ahead.raw[q], load, load < loads.count, counters);
    load += loads.threads;
  }
}

// Ranks of a token, each a bit, from the bytes of its choices. That of no choice may be the bit behind the last.
template <bool kFew>
__device__ __forceinline__ uint64_t wanted_ranks(const uint8_t* choices, int topk) {
  uint64_t wanted = 0;
  if (kFew && topk % 4 == 0) {
    uint32_t bits = 0;
#pragma unroll 2
    for (int k = 0; k < topk; k += 4) bits |= *reinterpret_cast<const uint32_t*>(choices + k);
    bits |= bits >> 16;
    return (bits | bits >> 8) & 0xFF;
  }
#pragma unroll 1
  for (int k = 0; k < topk; k++) {
    const uint32_t byte = choices[k];
    wanted |= kFew ? byte : byte < kMaxCudaRanks ? 1ull << byte : 0;
  }
  return wanted;
}

// A thread a token, up to 8 ranks: a thread counts in bytes, which a tile does not fill, a warp in halves.
__device__ __forceinline__ void count_tokens_of_few(const RouteRole& role, int tokens) {
  const int topk = role.p.shape.topk, r = role.lane;
  constexpr uint32_t kSpread = 1 | 1 << 7 | 1 << 14 | 1 << 21, kBytes = 0x01010101, kHalves = 0x00FF00FF;
  static_assert(HtRouteGeometry::kTileLimit / 1024 <= 0xFF);
  uint32_t low = 0, high = 0;  // ranks 0 to 3, 4 to 7
#pragma unroll 1
  for (int token = role.thread(); token < tokens; token += role.threads()) {
    const auto wanted = static_cast<uint32_t>(wanted_ranks<true>(role.tables.tile + token * topk, topk));
    low += (wanted & 15) * kSpread & kBytes;
    high += (wanted >> 4) * kSpread & kBytes;
  }
  const uint32_t low_even = __reduce_add_sync(~0u, low & kHalves), low_odd = __reduce_add_sync(~0u, low >> 8 & kHalves);
  const uint32_t high_even = __reduce_add_sync(~0u, high & kHalves);
  const uint32_t high_odd = __reduce_add_sync(~0u, high >> 8 & kHalves);
  if (r >= role.num_ranks()) return;
  const uint32_t even = r < 4 ? low_even : high_even, odd = r < 4 ? low_odd : high_odd;
  const uint32_t halves = r % 2 == 0 ? even : odd;
  atomicAdd(role.tables.rows + r, static_cast<int>(r % 4 < 2 ? halves & 0xFFFF : halves >> 16));
}

// Of up to 32 ranks from `first` on, one a lane: how many lanes have it in `wanted`.
__device__ __forceinline__ int count_wanted(uint32_t wanted, int ranks) {
  unsigned lanes = 0;
#pragma unroll 4
  for (int r = 0; r < ranks; r++) {
    const unsigned with = __ballot_sync(~0u, (wanted >> r & 1) != 0);
    if (lane_id() == r) lanes = with;
  }
  return __popc(lanes);
}

// A thread a token. Many ranks are counted by ballots: few counters would be hit by many threads.
__device__ __forceinline__ void count_tokens_of_many(const RouteRole& role, int tokens) {
  const int ranks = role.num_ranks(), topk = role.p.shape.topk;
  int counts[2] = {0, 0};  // of ranks `lane` and 32 + `lane`
#pragma unroll 1
  for (int first = role.warp * 32; first < tokens; first += role.threads()) {
    const int token = first + role.lane;
    const uint64_t wanted = token < tokens ? wanted_ranks<false>(role.tables.tile + token * topk, topk) : 0;
    counts[0] += count_wanted(static_cast<uint32_t>(wanted), min(ranks, 32));
    counts[1] += count_wanted(static_cast<uint32_t>(wanted >> 32), ranks - 32);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int r = half * 32 + role.lane;
    if (r < ranks) atomicAdd(role.tables.rows + r, counts[half]);
  }
}

template <Ids kIds, bool kFew>
__device__ __forceinline__ void count_tiles(const RouteRole& role, Ahead& ahead) {
  const int end = role.counted_tokens(), topk = role.p.shape.topk;
#pragma unroll 1
  for (int begin = 0; begin < end; begin += role.geometry.tile_tokens) {
    const int tokens = min(role.geometry.tile_tokens, end - begin);
    const auto loads = Loads<kIds>::of(role, static_cast<int64_t>(begin) * topk, tokens * topk);
    if (begin > 0) __syncthreads();
    if (loads.thread >= 0) {
      if (begin > 0 || kIds == Ids::kSingles) loads.ask_first(ahead);
      count_choices<kIds, kFew>(role, ahead, loads);
    }
    __syncthreads();
    if constexpr (kFew) {
      count_tokens_of_few(role, tokens);
    } else {
      count_tokens_of_many(role, tokens);
    }
  }
}

// ---- Table of contents

__device__ __forceinline__ void clear_counters(const RouteRole& role) {
  const RouteTables& t = role.tables;
  const int ranks = role.num_ranks(), experts = role.num_experts();
  for (int r = role.thread(); r < ranks; r += role.threads()) t.rows[r] = 0;
  for (int i = role.thread(); i < 2; i += role.threads()) t.total[i] = 0;
  if (role.geometry.copies_log == 0) {
    for (int e = role.thread(); e <= experts; e += role.threads()) t.choices[e] = 0;
    return;
  }
  auto* words = reinterpret_cast<uint4*>(t.lane_choices);
  const int count = ceil_div((experts + 1) << role.geometry.copies_log, 4);
  for (int i = role.thread(); i < count; i += role.threads()) words[i] = make_uint4(0, 0, 0, 0);
}

// The first loads do not wait for the call's epoch.
__device__ __forceinline__ Ahead begin_counting(const RouteRole& role) {
  Ahead ahead;
  const int choices = min(role.geometry.tile_tokens, role.counted_tokens()) * role.p.shape.topk;
  if (role.geometry.has_wide_ids && choices > 0 && role.warp > 0) {
    // 16 bytes at once, whatever the type: as count_tiles() would ask for those of the first tile.
    Loads<Ids::kPairs>::of(role, 0, choices / (role.p.is_idx64 ? 1 : 2)).ask_first(ahead);
  }
  clear_counters(role);
  return ahead;
}

// After begin_counting() and a barrier. Sums are there after the next barrier.
__device__ __forceinline__ void count_all(const RouteRole& role, Ahead& ahead) {
  const RouteTables& t = role.tables;
  const auto count = [&]<bool kFew>(std::bool_constant<kFew>) {
    if (!role.geometry.has_wide_ids) {
      count_tiles<Ids::kSingles, kFew>(role, ahead);
    } else if (role.p.is_idx64) {
      count_tiles<Ids::kPairs, kFew>(role, ahead);
    } else {
      count_tiles<Ids::kQuads, kFew>(role, ahead);
    }
  };
  if (role.num_ranks() <= 8) {
    count(std::true_type{});
  } else {
    count(std::false_type{});
  }
  if (role.geometry.copies_log == 0) return;
  // count_tiles() has passed a barrier since the last choice. Lanes begin at copies in different banks.
  const int copies = 1 << role.geometry.copies_log, own = role.lane << role.geometry.copies_log >> 5;
#pragma unroll 1
  for (int e = role.thread(); e < role.num_experts(); e += role.threads()) {
    int sum = 0;
#pragma unroll 8
    for (int c = 0; c < copies; c++) sum += t.lane_choices[e * copies + ((c + own) & (copies - 1))];
    t.choices[e] = sum;
  }
}

}  // namespace ep
