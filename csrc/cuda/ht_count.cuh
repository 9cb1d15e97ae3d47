// A block's share of the tokens in the routing kernel: what it counts, how it numbers its choices, and how the blocks
// of a rank learn of one another's counts. A lane looks at one choice; the first warp of a block looks at none, so that
// it can ask for the epoch, and greet the other ranks, meanwhile.
#pragma once

#include "cuda/ht_call.cuh"

namespace ep {

// What a block keeps in shared memory. Counts [R + E]: tokens for each rank, then choices of each expert.
struct RouteTables {
  int* share;           // [R + E] of the block's share
  int* sums;            // [R + E] of the shares before it; first block: of all
  int* warp_counts;     // [place_warps][R + E] of each placing warp; then what this rank has before its tokens
  int* before;          // [R + E] of the ranks before this one, in the place of `share`
  int *start, *demand;  // [E] first row of each expert at its owner; choices of all
  int *from, *layout, *capacity, *alignment, *tokens;  // [R], one after the other: what each rank's message tells

  static constexpr int kTold = 5;  // tables from `from` on

  __device__ static RouteTables of(char* shared, const HtRouteParams& p, const HtRouteGeometry& g) {
    SharedTables tables{shared};
    const auto take = [&](int count) { return tables.take<int>(count); };
    const int ranks = p.shape.num_ranks, experts = p.shape.num_experts;
    RouteTables t;
    t.share = t.before = take(ranks + experts);
    t.sums = take(ranks + experts);
    t.warp_counts = take(g.place_warps * (ranks + experts));
    t.start = take(experts);
    t.demand = take(experts);
    t.from = take(ranks);
    t.layout = take(ranks);
    t.capacity = take(ranks);
    t.alignment = take(ranks);
    t.tokens = take(ranks);
    return t;
  }
};

struct RouteRole : HtBlock {
  DeviceState* state;
  const HtRouteParams& p;
  const HtRouteGeometry& geometry;
  const LsaPeers& peers;
  const CallContext& call;
  RouteTables tables;

  __device__ int num_ranks() const { return p.shape.num_ranks; }
  __device__ int num_experts() const { return p.shape.num_experts; }
  __device__ int num_counts() const { return num_ranks() + num_experts(); }
  __device__ int shares() const { return ceil_div(p.num_tokens, geometry.chunk_tokens); }
  // Shares whose counts this block needs: those before its own, but the first block tells the other ranks of all.
  __device__ int needed_shares() const { return is_first() ? shares() : at.block < shares() ? at.block : 0; }
  // The last block writes down what all learn; the first has told the other ranks.
  __device__ bool records() const { return at.block == at.num_blocks - 1; }
};

// Lanes whose key is the same; a lane without one stands alone.
__device__ __forceinline__ unsigned same_key(bool has_key, int key) {
  return __match_any_sync(~0u, has_key ? key : static_cast<int>(0x80000000u | lane_id()));
}

// The choices of a step, a lane a choice in the order (token, k): step_tokens tokens, each k's lanes together.
struct StepLane {
  int turn, k;      // choice k of the turn-th token
  unsigned below;   // lanes before this one
  unsigned before;  // those of the tokens before

  __device__ __forceinline__ static StepLane of(const RouteRole& role) {
    StepLane lane;
    lane.turn = role.geometry.by_topk.divide(role.lane);
    lane.k = role.geometry.by_topk.remainder(role.lane, lane.turn);
    lane.below = (1u << role.lane) - 1;
    lane.before = (1u << (role.lane - lane.k)) - 1;
    return lane;
  }
  // Of the lanes that `rows` says have a rank in common, the first of each token. All lanes call.
  __device__ __forceinline__ unsigned leaders(bool has_rank, unsigned rows) const {
    return rows & __ballot_sync(~0u, has_rank && (rows & below & ~before) == 0);
  }
};

// Choices of a warp's steps that are looked at together.
struct Steps {
  static constexpr int kCount = 3;
  int first = 0;       // token
  int id[kCount];      // -1: no expert
  int choice[kCount];  // its number among the warp's choices of the expert
  int row[kCount];     // its token's among the warp's tokens for the expert's rank
};
struct RawSteps {
  RawId id[Steps::kCount];
};

// The tokens of a placing warp.
struct WarpShare : StepLane {
  int begin, end;
  int* counts;  // of this warp

  __device__ __forceinline__ static WarpShare of(const RouteRole& role) {
    const HtRouteGeometry& g = role.geometry;
    const int index = role.warp - 1;
    const int share_end = min(role.p.num_tokens, (role.at.block + 1) * g.chunk_tokens);
    WarpShare share{StepLane::of(role)};
    share.begin = role.at.block * g.chunk_tokens + index * g.warp_tokens;
    share.end = index >= 0 && index < g.place_warps ? min(share_end, share.begin + g.warp_tokens) : share.begin;
    share.counts = role.tables.warp_counts + index * role.num_counts();
    return share;
  }
  __device__ bool is_empty() const { return begin >= end; }
  __device__ int token(const RouteRole& role, int first, int q) const {
    return first + q * role.geometry.step_tokens + turn;
  }
  __device__ bool exists(const RouteRole& role, int token) const {
    return turn < role.geometry.step_tokens && token < end;
  }
  __device__ int64_t entry(const RouteRole& role, int token) const {
    return static_cast<int64_t>(token) * role.p.shape.topk + k;
  }
  __device__ __forceinline__ RawSteps ask(const RouteRole& role, int first) const {
    RawSteps raw;
#pragma unroll
    for (int q = 0; q < Steps::kCount; q++) {
      const int64_t choice = entry(role, min(token(role, first, q), end - 1));
      raw.id[q] = RawId::load(role.p.topk_idx, role.p.is_idx64, choice);
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
    const int token = share.token(role, steps.first, q);
    const int64_t id = raw.id[q].value(role.p.is_idx64);
    if (share.exists(role, token) && steps.id[q] < 0 && id != -1) {
      report_invalid_id(role.state, id, token, share.k);
    }
  }
}

// Counts too: for the share, and on from what the warp has counted.
__device__ __forceinline__ Steps number_steps(const RouteRole& role, const WarpShare& share, int first,
                                              const RawSteps& raw) {
  constexpr int kCount = Steps::kCount;
  const int ranks = role.num_ranks();
  Steps steps;
  steps.first = first;
  int rank[kCount];
  unsigned same[kCount], rows[kCount];  // lanes of the same expert; of the same rank, one for each token
  bool is_invalid = false;
#pragma unroll
  for (int q = 0; q < kCount; q++) {
    const bool exists = share.exists(role, share.token(role, first, q));
    const auto id = static_cast<int>(raw.id[q].below(role.num_experts(), role.p.is_idx64));
    is_invalid = is_invalid || (exists && id < 0 && raw.id[q].value(role.p.is_idx64) != -1);
    steps.id[q] = exists ? id : -1;
    const bool has_expert = steps.id[q] >= 0;
    rank[q] = has_expert ? role.geometry.by_local_experts.divide(id) : 0;
    same[q] = same_key(has_expert, id);
    rows[q] = share.leaders(has_expert, same_key(has_expert, rank[q]));
    steps.choice[q] = __popc(same[q] & share.below);
    steps.row[q] = __popc(rows[q] & share.before);
  }
#pragma unroll
  for (int q = 0; q < kCount; q++) {
    const bool has_expert = steps.id[q] >= 0;
    const int expert = ranks + max(steps.id[q], 0);
    // A number is read by all lanes before one moves it on.
    steps.choice[q] += share.counts[expert];
    steps.row[q] += share.counts[rank[q]];
    __syncwarp();
    if (has_expert && (same[q] & share.below) == 0) {
      share.counts[expert] = steps.choice[q] + __popc(same[q]);
      atomicAdd(role.tables.share + expert, __popc(same[q]));
    }
    if (has_expert && (rows[q] & share.below) == 0) {
      share.counts[rank[q]] = steps.row[q] + __popc(rows[q]);
      atomicAdd(role.tables.share + rank[q], __popc(rows[q]));
    }
    __syncwarp();
  }
  if (is_invalid) report_invalid_ids(role, share, steps, raw);
  __syncwarp();
  return steps;
}

// The last steps stay in registers, the others wait where the handle will have their rows. `raw`: ids of the first.
__device__ __forceinline__ Steps number_share(const RouteRole& role, const WarpShare& share, RawSteps raw) {
  const HtRoutes& own = role.p.handle.own;
  const int together = Steps::kCount * role.geometry.step_tokens;
  Steps steps;
  if (share.is_empty()) return steps;
  int first = share.begin;
#pragma unroll 1
  while (true) {
    steps = number_steps(role, share, first, raw);
    first += together;
    if (first >= share.end) return steps;
#pragma unroll
    for (int q = 0; q < Steps::kCount; q++) {
      const int token = share.token(role, steps.first, q);
      if (!share.exists(role, token)) continue;
      const int64_t entry = share.entry(role, token);
      own.ids[entry] = steps.id[q];
      own.rows[entry] = steps.choice[q];
      own.slots[entry] = steps.row[q];
    }
    raw = share.ask(role, first);
  }
}

// Steps that number_share() has put by.
__device__ __forceinline__ Steps load_steps(const RouteRole& role, const WarpShare& share, int first) {
  const HtRoutes& own = role.p.handle.own;
  Steps steps;
  steps.first = first;
#pragma unroll
  for (int q = 0; q < Steps::kCount; q++) {
    const int64_t entry = share.entry(role, min(share.token(role, first, q), share.end - 1));
    steps.id[q] = own.ids[entry];
    steps.choice[q] = own.rows[entry];
    steps.row[q] = own.slots[entry];
  }
  return steps;
}

// ---- The blocks of this rank

__device__ __forceinline__ void tell_blocks(const RouteRole& role) {
  const int counts = role.num_counts();
  if (role.at.block >= role.shares()) return;
#pragma unroll 1
  for (int i = role.thread(); i < counts; i += role.threads()) {
    const auto count = static_cast<uint32_t>(role.tables.share[i]);
    ptx::st_relaxed_gpu(role.p.block_counts + role.at.block * counts + i, tagged(count, role.call.tag));
  }
}

// Adds up the shares that this block needs. False: some are not known yet, their blocks may not even run.
__device__ __forceinline__ bool hear_blocks(const RouteRole& role) {
  constexpr int kTogether = 4, kLooks = 32;  // of some 0.5 us
  const int counts = role.num_counts(), words = role.needed_shares() * counts, threads = role.threads() - 32;
  if (role.warp == 0) return true;
#pragma unroll 1
  for (int first = role.thread() - 32; first < words; first += kTogether * threads) {
    uint64_t seen[kTogether];
    bool is_known;
    int looks = 0;
#pragma unroll 1
    do {
#pragma unroll
      for (int q = 0; q < kTogether; q++) {
        seen[q] = ptx::ld_relaxed_gpu(role.p.block_counts + min(first + q * threads, words - 1));
      }
      is_known = true;
#pragma unroll
      for (int q = 0; q < kTogether; q++) is_known = is_known && is_tagged(seen[q], role.call.tag);
    } while (!is_known && ++looks < kLooks);
    if (!is_known) return false;
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      const int i = first + q * threads;
      const int index = role.geometry.by_counts.remainder(i, role.geometry.by_counts.divide(i));
      if (i < words) atomicAdd(role.tables.sums + index, static_cast<int>(static_cast<uint32_t>(seen[q])));
    }
  }
  return true;
}

// Instead of hear_blocks(): the block counts the tokens of these shares itself. A barrier before and behind.
__device__ __forceinline__ void count_shares(const RouteRole& role) {
  const HtRouteGeometry& g = role.geometry;
  const int end = min(role.p.num_tokens, role.needed_shares() * g.chunk_tokens);
  const int ranks = role.num_ranks(), topk = role.p.shape.topk;
  const StepLane lane = StepLane::of(role);
  for (int i = role.thread(); i < role.num_counts(); i += role.threads()) role.tables.sums[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int first = role.warp * g.step_tokens; first < end; first += role.threads() / 32 * g.step_tokens) {
    const int token = first + lane.turn;
    const int64_t choice = static_cast<int64_t>(min(token, end - 1)) * topk + lane.k;
    const auto raw = RawId::load(role.p.topk_idx, role.p.is_idx64, choice);
    const auto id = static_cast<int>(raw.below(role.num_experts(), role.p.is_idx64));
    const bool has_expert = lane.turn < g.step_tokens && token < end && id >= 0;
    const int rank = has_expert ? g.by_local_experts.divide(id) : 0;
    const unsigned leaders = lane.leaders(has_expert, same_key(has_expert, rank));
    if (has_expert) atomicAdd(role.tables.sums + ranks + id, 1);
    if (has_expert && (leaders >> role.lane & 1) != 0) atomicAdd(role.tables.sums + rank, 1);
  }
}

// ---- The warps of this block

// Counts of each placing warp to what this rank has before its tokens.
__device__ __forceinline__ void add_up_warps(const RouteRole& role) {
  constexpr int kTogether = 8;
  const int counts = role.num_counts(), warps = role.geometry.place_warps;
#pragma unroll 1
  for (int i = role.thread(); i < counts; i += role.threads()) {
    int before = role.is_first() ? 0 : role.tables.sums[i];
    int* of_warp = role.tables.warp_counts + i;
#pragma unroll 1
    for (int first = 0; first < warps; first += kTogether) {
      int count[kTogether];
#pragma unroll
      for (int q = 0; q < kTogether; q++) count[q] = first + q < warps ? of_warp[(first + q) * counts] : 0;
#pragma unroll
      for (int q = 0; q < kTogether; q++) {
        if (first + q < warps) of_warp[(first + q) * counts] = before;
        before += count[q];
      }
    }
  }
}

__device__ __forceinline__ void clear_counts(const RouteRole& role) {
  auto* words = reinterpret_cast<uint4*>(role.tables.share);  // one after the other; what lies behind is filled later
  const int count = ceil_div((2 + role.geometry.place_warps) * role.num_counts(), 4);
#pragma unroll 1
  for (int i = role.thread(); i < count; i += role.threads()) words[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace ep
