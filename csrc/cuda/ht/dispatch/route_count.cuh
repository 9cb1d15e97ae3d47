// A block's share of the tokens in the routing kernel: what it counts, how it numbers its choices, and how the blocks
// of a rank learn of one another's counts. A lane handles one choice. The first warp of a block handles none, so that
// it can load the epoch, and exchange op headers with the other ranks, meanwhile.
#pragma once

#include "cuda/device/scans.cuh"
#include "cuda/ht/common/geometry.h"
#include "cuda/ht/common/op_context.cuh"
#include "cuda/ht/common/tables.cuh"
#include "cuda/ht/common/work.cuh"
#include "cuda/protocol/ids.cuh"

namespace ep {
inline namespace EP_KERNELS {

// What a block keeps in shared memory. Counts are of choices of each expert, of no expert, of tokens for each rank, of
// those for none: [E + 1 + R + 1], so that what is no choice needs no branch.
struct RouteTables {
  int* share;                          // counts of the block's share: of experts, where they are not numbered
  int* sums;                           // of the shares before it; first block: of all
  int* warp_counts;                    // [place_warps] of each placing warp, then what the share has before its tokens
  int* has_expert_rows;                // whether any rank's output has
  int* before;                         // of the ranks before this one; in the place of `share`
  int *start, *demand;                 // [E] first row of each expert at its owner; choices of all
  int *layout, *capacity, *alignment;  // [R], one after the other: what each rank's op message says

  static constexpr int kNumAnnounced = 3;  // tables from `layout` on

  __device__ static RouteTables of(char* shared, const HtRouteParams& p, const HtRouteGeometry& g) {
    SharedTables tables{shared};
    const auto take = [&](int count) { return tables.take<int>(count); };
    const int ranks = p.shape.num_ranks, experts = p.shape.num_experts;
    RouteTables t;
    t.share = t.before = take(g.counts);
    t.sums = take(g.counts);
    t.warp_counts = take(g.place_warps * g.counts);
    t.has_expert_rows = take(1);
    t.start = take(experts);
    t.demand = take(experts);
    t.layout = take(ranks);
    t.capacity = take(ranks);
    t.alignment = take(ranks);
    return t;
  }
};

struct RouteRole : HtBlock {
  DeviceState* state;
  const HtRouteParams& p;
  const HtRouteGeometry& geometry;
  const LsaPeers& peers;
  const HtOpContext& op;
  RouteTables tables;
  HtRailPart part;

  __device__ int num_ranks() const { return p.shape.num_ranks; }
  __device__ int num_experts() const { return p.shape.num_experts; }
  __device__ int local_experts() const { return p.output.local_experts; }
  __device__ int rank_of(int id) const { return geometry.by_local_experts.divide(id); }
  __device__ int count_of_rank(int rank) const { return num_experts() + 1 + rank; }
  // Count `i` of an op message, which has ranks before experts.
  __device__ int count_of_word(int i) const { return i < num_ranks() ? count_of_rank(i) : i - num_ranks(); }
  // Threads are counted from the last where the first warp should be free for its other work.
  __device__ int last_first() const { return threads() - 1 - thread(); }
  // Shares whose counts this block needs: those before its own. The first block sends all of them to the other ranks.
  __device__ int needed_shares() const {
    return is_first() ? geometry.shares : at.block < geometry.shares ? at.block : 0;
  }
  // The last block stores what all blocks learn, because the first block has messages to send.
  __device__ bool records() const { return at.block == at.num_blocks - 1; }
};

// The choices of a step, a lane a choice in the order (token, k): as many tokens as a warp has room for.
struct StepLane {
  int choices;      // of a step
  unsigned below;   // lanes before this one
  unsigned before;  // those of the tokens before

  __device__ __forceinline__ static StepLane of(const RouteRole& role) {
    const Divisor& by_topk = role.geometry.by_topk;
    const int k = by_topk.remainder(role.lane, by_topk.divide(role.lane));
    return {role.geometry.step_tokens * role.p.shape.topk, (1u << role.lane) - 1, (1u << (role.lane - k)) - 1};
  }
  // `same`: lanes with the same rank. True for the first of its token among them.
  __device__ bool leads(unsigned same) const { return (same & below & ~before) == 0; }
};

// Choices of a warp's steps that are looked at together.
struct Steps {
  static constexpr int kCount = 3;
  int first = 0;       // choice of this lane in the first step
  int id[kCount];      // [0, E), or E: no expert
  int choice[kCount];  // its number among the warp's choices of the expert, then among the rank's; 0: none was given
  int row[kCount];     // its token's among the warp's tokens for the expert's rank, likewise
};
struct RawSteps {
  RawId id[Steps::kCount];
  uint32_t limit[Steps::kCount];  // of ids: E, or 0 where there is no choice

  __device__ __forceinline__ int expert(const RouteRole& role, int q) const {
    const uint32_t high = role.p.is_idx64 ? id[q].high : 0;
    return static_cast<int>(high == 0 && id[q].low < limit[q] ? id[q].low : role.num_experts());
  }
};

// The choices of a placing warp's tokens.
struct WarpShare : StepLane {
  int begin, end;  // of this lane: choices are counted from the rank's first
  int* counts;     // of this warp

  __device__ __forceinline__ static WarpShare of(const RouteRole& role) {
    const HtRouteGeometry& g = role.geometry;
    const int index = role.warp - 1, topk = role.p.shape.topk;
    const int first = role.at.block * g.chunk_tokens + index * g.warp_tokens;
    const int share_end = min(role.p.num_tokens, (role.at.block + 1) * g.chunk_tokens);
    WarpShare share{StepLane::of(role)};
    share.begin = first * topk + role.lane;
    share.end = (index >= 0 && index < g.place_warps ? min(share_end, first + g.warp_tokens) : first) * topk;
    share.counts = role.tables.warp_counts + index * g.counts;
    return share;
  }
  // Of the warp.
  __device__ bool is_empty() const { return begin - lane_id() >= end; }
  __device__ bool is_past(int first) const { return first - lane_id() >= end; }
  __device__ bool exists(int choice) const { return lane_id() < choices && choice < end; }

  __device__ __forceinline__ RawSteps prefetch(const RouteRole& role, int first) const {
    RawSteps raw;
#pragma unroll
    for (int q = 0; q < Steps::kCount; q++) {
      const int choice = first + q * choices;
      raw.id[q] = RawId::load(role.p.topk_idx, role.p.is_idx64, min(choice, end - 1));
      raw.limit[q] = exists(choice) ? role.num_experts() : 0;
    }
    return raw;
  }
};

static __device__ __noinline__ void report_invalid_id(DeviceState* state, int64_t id, int token, int k) {
  note_invalid_id(state, id, token, k);
}

__device__ __forceinline__ void report_invalid_ids(const RouteRole& role, const WarpShare& share, const Steps& steps,
                                                   const RawSteps& raw) {
#pragma unroll
  for (int q = 0; q < Steps::kCount; q++) {
    const int64_t id = raw.id[q].value(role.p.is_idx64);
    if (raw.limit[q] == 0 || steps.id[q] < role.num_experts() || id == -1) continue;
    const int choice = steps.first + q * share.choices, token = role.geometry.by_topk.divide(choice);
    report_invalid_id(role.state, id, token, role.geometry.by_topk.remainder(choice, token));
  }
}

// Continues from what the warp has counted. kExperts: choices of an expert get numbers; without, they are only counted,
// for the share. kIsFirst: they have not been looked at before.
template <bool kExperts, bool kIsFirst>
__device__ __forceinline__ Steps number_steps(const RouteRole& role, const WarpShare& share, int first,
                                              const RawSteps& raw) {
  constexpr int kCount = Steps::kCount;
  Steps steps;
  steps.first = first;
  int rank[kCount];
  unsigned same[kCount], rows[kCount];  // lanes of the same expert; of the same rank, one for each token
  bool lacks_some = false;
#pragma unroll
  for (int q = 0; q < kCount; q++) {
    const int id = steps.id[q] = raw.expert(role, q);
    lacks_some |= raw.limit[q] != 0 && id == role.num_experts();
    rank[q] = role.rank_of(id);
    steps.choice[q] = 0;
    if constexpr (!kExperts) atomicAdd(role.tables.share + id, 1);
  }
  find_same_lanes(rank, role.geometry.rank_bits, rows);
  if constexpr (kExperts) find_same_lanes(steps.id, role.geometry.expert_bits, same);
#pragma unroll
  for (int q = 0; q < kCount; q++) {
    if constexpr (kExperts) steps.choice[q] = __popc(same[q] & share.below);
    const bool leads = share.leads(rows[q]);
    rows[q] &= __ballot_sync(~0u, leads);
    steps.row[q] = __popc(rows[q] & share.before);
  }
#pragma unroll
  for (int q = 0; q < kCount; q++) {
    // A number is read by all lanes before the last one moves it on.
    if constexpr (kExperts) steps.choice[q] += share.counts[steps.id[q]];
    int& row_count = share.counts[role.count_of_rank(rank[q])];
    steps.row[q] += row_count;
    __syncwarp();
    if constexpr (kExperts) {
      if ((same[q] & ~share.below) == share.below + 1) share.counts[steps.id[q]] = steps.choice[q] + 1;
    }
    if ((rows[q] & ~share.below) == share.below + 1) row_count = steps.row[q] + 1;
    __syncwarp();
  }
  if (kIsFirst && lacks_some) report_invalid_ids(role, share, steps, raw);
  __syncwarp();
  return steps;
}

__device__ __forceinline__ void store_ids(const RouteRole& role, const WarpShare& share, const Steps& steps) {
#pragma unroll
  for (int q = 0; q < Steps::kCount; q++) {
    const int choice = steps.first + q * share.choices, id = steps.id[q];
    if (share.exists(choice)) role.p.handle.own.ids[choice] = id < role.num_experts() ? id : -1;
  }
}

// The last steps stay in registers, the others wait where the handle will have their rows. `raw`: ids of the first.
template <bool kExperts, bool kIsFirst>
__device__ __forceinline__ Steps number_share(const RouteRole& role, const WarpShare& share, RawSteps raw) {
  const HtRoutes& own = role.p.handle.own;
  Steps steps;
  if (share.is_empty()) return steps;
  int first = share.begin;
#pragma unroll 1
  while (true) {
    steps = number_steps<kExperts, kIsFirst>(role, share, first, raw);
    first += Steps::kCount * share.choices;
    if (share.is_past(first)) return steps;
    store_ids(role, share, steps);
#pragma unroll
    for (int q = 0; q < Steps::kCount; q++) {
      const int choice = steps.first + q * share.choices;
      if (!share.exists(choice)) continue;
      own.rows[choice] = steps.choice[q];
      own.slots[choice] = steps.row[q];
    }
    raw = share.prefetch(role, first);
  }
}

// Steps that number_share() has put by.
__device__ __forceinline__ Steps load_steps(const RouteRole& role, const WarpShare& share, int first) {
  const HtRoutes& own = role.p.handle.own;
  Steps steps;
  steps.first = first;
#pragma unroll
  for (int q = 0; q < Steps::kCount; q++) {
    const int choice = min(first + q * share.choices, share.end - 1), id = own.ids[choice];
    steps.id[q] = id >= 0 ? id : role.num_experts();
    steps.choice[q] = own.rows[choice];
    steps.row[q] = own.slots[choice];
  }
  return steps;
}

// From numbers of the warp to numbers of the rank, when the shares before are known.
__device__ __forceinline__ void finish_numbers(const RouteRole& role, const WarpShare& share, Steps& steps) {
  const auto before = [&](int count) { return share.counts[count] + (role.is_first() ? 0 : role.tables.sums[count]); };
#pragma unroll
  for (int q = 0; q < Steps::kCount; q++) {
    steps.choice[q] += before(steps.id[q]);
    steps.row[q] += before(role.count_of_rank(role.rank_of(steps.id[q])));
  }
}

// ---- The warps of this block

// Of counts from `first` on, those of placing warps become what the share has before each of them; tell(index, sum) is
// called with the share's. Four lanes a count, each of which has eight warps: one thread alone takes 2 us for 31.
template <class Tell>
__device__ __forceinline__ void add_up_warps(const RouteRole& role, int first, const Tell& tell) {
  constexpr int kLanes = 4, kEach = 32 / kLanes;
  const int counts = role.geometry.counts, from_last = role.threads() / 32 - 1 - role.warp;
  const int part = role.lane % kLanes, warps = role.geometry.place_warps - part * kEach;  // from this lane's first on
#pragma unroll 1
  for (int begin = from_last * 32; begin < (counts - first) * kLanes; begin += role.threads()) {
    const int index = first + (begin + role.lane) / kLanes;
    const bool exists = index < counts;
    int* of_warp = role.tables.warp_counts + part * kEach * counts + index;
    int count[kEach], sum = 0;
#pragma unroll
    for (int q = 0; q < kEach; q++) count[q] = exists && q < warps ? of_warp[q * counts] : 0;
#pragma unroll
    for (int q = 0; q < kEach; q++) sum += count[q];
    int before = sum;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      before += part >= step ? other : 0;
    }
    if (exists && part == kLanes - 1) tell(index, before);
    before -= sum;
#pragma unroll
    for (int q = 0; q < kEach; q++) {
      if (exists && q < warps) of_warp[q * counts] = before;
      before += count[q];
    }
  }
}

// ---- The blocks of this rank

// Gives the share's counts to the other blocks. kExpertRows: choices of experts have numbers.
template <bool kExpertRows>
__device__ __forceinline__ void tell_blocks(const RouteRole& role) {
  if (role.at.block >= role.geometry.shares) return;
  const int counts = role.geometry.counts, first_of_warps = kExpertRows ? 0 : role.count_of_rank(0);
  const auto tell = [&](int index, int count) {
    ptx::st_relaxed_gpu(role.p.block_counts + role.at.block * counts + index,
                        tagged(static_cast<uint32_t>(count), role.op.tag));
  };
#pragma unroll 1
  for (int i = role.last_first(); i < first_of_warps; i += role.threads()) tell(i, role.tables.share[i]);
  add_up_warps(role, first_of_warps, tell);
}

// Adds up what this block needs of the shares. False: some are not known yet. Their blocks may not even run.
template <bool kExpertRows>
__device__ __forceinline__ bool hear_blocks(const RouteRole& role) {
  constexpr int kBatchSize = 4, kPolls = 32;  // shares of a count that a thread adds up; looks of some 0.5 us
  const HtRouteGeometry& g = role.geometry;
  const int shares = role.needed_shares(), groups = ceil_div(shares, kBatchSize);
  // Ranks' counts come last. Those of experts are for the other ranks, and for numbers.
  const bool takes_all = role.is_first() || kExpertRows;
  const Divisor& by_counts = takes_all ? g.by_counts : g.by_rank_counts;
  const int counts = static_cast<int>(by_counts.divisor), skipped = g.counts - counts;
  const int most_looks = testing_looks(kPolls, role.op.epoch);
  if (role.warp == 0) return true;
#pragma unroll 1
  for (int i = role.last_first(); i < groups * counts; i += role.threads() - 32) {
    const int group = by_counts.divide(i), index = skipped + by_counts.remainder(i, group);
    uint64_t seen[kBatchSize];
    bool is_known;
    int looks = 0;
#pragma unroll 1
    do {
#pragma unroll
      for (int q = 0; q < kBatchSize; q++) {
        const int share = min(group * kBatchSize + q, shares - 1);
        seen[q] = ptx::ld_relaxed_gpu(role.p.block_counts + share * g.counts + index);
      }
      is_known = true;
#pragma unroll
      for (int q = 0; q < kBatchSize; q++) is_known &= is_tagged(seen[q], role.op.tag);
    } while (!is_known && ++looks < most_looks);
    if (!is_known) return false;
    int sum = 0;
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) {
      if (group * kBatchSize + q < shares) sum += static_cast<int>(static_cast<uint32_t>(seen[q]));
    }
    atomicAdd(role.tables.sums + index, sum);
  }
  return true;
}

// Instead of hear_blocks(): the block counts the tokens of these shares itself. It needs a barrier before and after.
__device__ __forceinline__ void count_shares(const RouteRole& role) {
  const HtRouteGeometry& g = role.geometry;
  const int end = min(role.p.num_tokens, role.needed_shares() * g.chunk_tokens), experts = role.num_experts();
  const int end_choice = end * role.p.shape.topk, step = role.threads() / 32;
  const StepLane lane = StepLane::of(role);
  for (int i = role.thread(); i < g.counts; i += role.threads()) role.tables.sums[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int first = role.warp * lane.choices; first < end_choice; first += step * lane.choices) {
    const int choice = first + role.lane;
    const RawId raw = RawId::load(role.p.topk_idx, role.p.is_idx64, min(choice, end_choice - 1));
    const auto valid = static_cast<int>(raw.below(experts, role.p.is_idx64));
    const int id = role.lane < lane.choices && choice < end_choice && valid >= 0 ? valid : experts;
    const int rank = role.rank_of(id);
    atomicAdd(role.tables.sums + id, 1);
    if (lane.leads(find_same_lanes(rank, role.geometry.rank_bits))) {
      atomicAdd(role.tables.sums + role.count_of_rank(rank), 1);
    }
  }
}

__device__ __forceinline__ void clear_counts(const RouteRole& role) {
  auto* words = reinterpret_cast<uint4*>(role.tables.share);  // one after the other; what lies behind is filled later
  const int count = ceil_div((2 + role.geometry.place_warps) * role.geometry.counts + 1, 4);
#pragma unroll 1
  for (int i = role.thread(); i < count; i += role.threads()) words[i] = make_uint4(0, 0, 0, 0);
}

// Numbers of experts' choices after all: another rank's output has expert rows. All warps of the block.
__device__ __forceinline__ Steps number_again(const RouteRole& role, const WarpShare& share) {
  const int counts = role.geometry.counts;
  for (int i = role.thread(); i < role.geometry.place_warps * counts; i += role.threads()) {
    role.tables.warp_counts[i] = 0;
  }
  __syncthreads();
  if (!role.is_first()) count_shares(role);
  Steps last;
  if (!share.is_empty()) last = number_share<true, false>(role, share, share.prefetch(role, share.begin));
  __syncthreads();
  add_up_warps(role, 0, [](int, int) {});
  __syncthreads();
  if (!share.is_empty()) finish_numbers(role, share, last);
  return last;
}

}  // namespace EP_KERNELS
}  // namespace ep
