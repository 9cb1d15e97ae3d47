// The first half of high-throughput dispatch: every block counts all tokens, the first tells the other ranks, and each
// places the tokens of its own share at their receivers. The table of contents is ht_route(), at the end.
#pragma once

#include "cuda/ht_call.cuh"

namespace ep {

// What a block keeps in shared memory. "before": of tokens before this block's share.
struct RouteTables {
  int *rows_before, *rows;        // [R] own tokens for each rank
  int *choices_before, *choices;  // [E] own choices of each expert
  int* first_slot;                // [R] of this rank's rows at each receiver
  int* from;                      // [R] rows from each rank to this one
  int *layout, *capacity;         // [R] of each receiver's output
  int *start, *index;             // [E] first row of each expert at its owner; choices of ranks before this one
  int *warp_rows, *warp_choices;  // [place_warps][R], [E]: counts, then numbers before each warp's tokens

  __device__ static RouteTables of(char* shared, const HtRouteParams& p, const HtRouteGeometry& g) {
    auto* next = reinterpret_cast<int*>(shared);
    const auto take = [&](int count) {
      int* table = next;
      next += count;
      return table;
    };
    const int ranks = p.shape.num_ranks, experts = p.shape.num_experts;
    RouteTables t;
    t.rows_before = take(ranks);
    t.rows = take(ranks);
    t.choices_before = take(experts);
    t.choices = take(experts);
    t.warp_rows = take(g.place_warps * ranks);
    t.warp_choices = take(g.place_warps * experts);
    t.first_slot = take(ranks);
    t.from = take(ranks);
    t.layout = take(ranks);
    t.capacity = take(ranks);
    t.start = take(experts);
    t.index = take(experts);
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
  __device__ int chunk_begin() const { return at.block * geometry.chunk_tokens; }
  __device__ int chunk_end() const { return min(p.num_tokens, chunk_begin() + geometry.chunk_tokens); }
  // The last block writes down what all learn; the first has told the other ranks.
  __device__ bool records() const { return at.block == at.num_blocks - 1; }
  // Ids are asked for without a look at them, within bounds: a load with an alternative is waited for where it stands.
  __device__ int64_t ask_id(int token, int k) const {
    const int64_t last = static_cast<int64_t>(p.num_tokens) * p.shape.topk - 1;
    return load_id(p.topk_idx, p.is_idx64, min(static_cast<int64_t>(token) * p.shape.topk + k, last));
  }
  __device__ int valid(int64_t id) const { return id >= 0 && id < num_experts() ? static_cast<int>(id) : -1; }
};

// ---- Counting

__device__ __forceinline__ void clear_tables(const RouteRole& role) {
  const int ranks = role.num_ranks(), experts = role.num_experts();
  const int count = (2 + role.geometry.place_warps) * (ranks + experts);
  for (int i = role.thread(); i < count; i += role.threads()) role.tables.rows_before[i] = 0;
}

// A thread a token. Tokens for a rank are counted by the warp: few counters would be hit by many threads.
__device__ __forceinline__ void count_tokens(const RouteRole& role) {
  constexpr int kTogether = 8;
  const RouteTables& t = role.tables;
  const int ranks = role.num_ranks(), warps = role.threads() / 32, topk = role.p.shape.topk;
  int before[2] = {0, 0}, all[2] = {0, 0};  // of ranks `lane` and 32 + `lane`
#pragma unroll 1
  for (int first = role.warp * 32; first < role.p.num_tokens; first += warps * 32) {
    const int token = first + role.lane;
    const bool is_before = first < role.chunk_begin();
    uint64_t wanted = 0;
#pragma unroll 1
    for (int first_k = 0; first_k < topk; first_k += kTogether) {
      int64_t ids[kTogether];
#pragma unroll
      for (int q = 0; q < kTogether; q++) ids[q] = role.ask_id(token, first_k + q);
#pragma unroll
      for (int q = 0; q < kTogether; q++) {
        const int id = role.valid(ids[q]);
        if (id < 0 || token >= role.p.num_tokens || first_k + q >= topk) continue;
        wanted |= 1ull << role.geometry.by_local_experts.divide(id);
        atomicAdd((is_before ? t.choices_before : t.choices) + id, 1);
      }
    }
#pragma unroll 1
    for (int r = 0; r < ranks; r++) {
      const int count = __popc(__ballot_sync(~0u, (wanted >> r & 1) != 0));
      if (role.lane != (r & 31)) continue;
      all[r >> 5] += count;
      if (is_before) before[r >> 5] += count;
    }
  }
  for (int half = 0; half < 2; half++) {
    const int r = half * 32 + role.lane;
    if (r >= ranks) break;
    atomicAdd(t.rows + r, all[half]);
    atomicAdd(t.rows_before + r, before[half]);
  }
}

// Calls visit(token, k, exists, id) with lanes in the order (token, k); id is -1 where there is no expert.
template <class Visit>
__device__ __forceinline__ void for_each_step(const RouteRole& role, const Visit& visit) {
  if (role.warp >= role.geometry.place_warps) return;
  const int turn = role.geometry.by_topk.divide(role.lane), k = role.geometry.by_topk.remainder(role.lane, turn);
  const int begin = role.chunk_begin() + role.warp * role.geometry.warp_tokens;
  const int end = min(role.chunk_end(), begin + role.geometry.warp_tokens);
  if (begin >= end) return;
  int64_t id = role.ask_id(begin + turn, k);
#pragma unroll 1
  for (int first = begin; first < end; first += role.geometry.step_tokens) {
    const int token = first + turn;
    const bool exists = turn < role.geometry.step_tokens && token < end;
    const int64_t next = role.ask_id(token + role.geometry.step_tokens, k);
    visit(token, k, exists, exists ? role.valid(id) : -1);
    id = next;
  }
}

// Lanes whose key is the same; a lane without one stands alone.
__device__ __forceinline__ unsigned same_key(bool has_key, int key) {
  return __match_any_sync(~0u, has_key ? key : static_cast<int>(0x80000000u | lane_id()));
}

__device__ __forceinline__ void count_share(const RouteRole& role) {
  const int ranks = role.num_ranks(), experts = role.num_experts();
  for_each_step(role, [&](int token, int, bool, int id) {
    const int rank = id >= 0 ? role.geometry.by_local_experts.divide(id) : -1;
    if (id >= 0) atomicAdd(role.tables.warp_choices + role.warp * experts + id, 1);
    const unsigned group = same_key(id >= 0, token * ranks + rank);
    if (id >= 0 && __ffs(static_cast<int>(group)) - 1 == role.lane) {
      atomicAdd(role.tables.warp_rows + role.warp * ranks + rank, 1);
    }
  });
}

// ---- The other ranks

__device__ __forceinline__ uint32_t call_word_of(const HtDispatchParams& p, const RouteTables* tables, int index) {
  if (index == HtCall::kLayout) return static_cast<uint32_t>(p.output.layout);
  if (index == HtCall::kCapacity) return static_cast<uint32_t>(p.output.capacity);
  if (index == HtCall::kAlignment) return static_cast<uint32_t>(p.output.alignment);
  if (index == HtCall::kChunks) return static_cast<uint32_t>(p.chunks);
  if (index < HtCall::kCounts) {
    const int part = (index - HtCall::kOffsets) / 2;
    if (index < HtCall::kOffsets || part >= kHtMaxParts) return 0;
    const Offset offset = part < p.num_parts ? p.parts[part].out_offset : kNoOffset;
    return static_cast<uint32_t>((index - HtCall::kOffsets) % 2 == 0 ? offset : offset >> 32);
  }
  const int count = index - HtCall::kCounts, ranks = p.shape.num_ranks;
  if (count < ranks) return static_cast<uint32_t>(tables->rows[count]);
  return static_cast<uint32_t>(tables->choices_before[count - ranks] + tables->choices[count - ranks]);
}

// Reads the counts of all ranks. Choices of each expert by all of them go into tables.start for now.
__device__ __forceinline__ void take_counts(const RouteRole& role) {
  const RouteTables& t = role.tables;
  const HtLayout& layout = role.p.layout;
  const int ranks = role.num_ranks(), experts = role.num_experts(), rank = role.peers.rank;
  const auto word = [&](int source, int index) {
    return static_cast<int>(await_call_word(role.call, layout, role.peers, source, index));
  };
#pragma unroll 1
  for (int e = role.thread(); e < experts; e += role.threads()) {
    int before = 0, all = 0;
#pragma unroll 1
    for (int first = 0; first < ranks; first += CallWords::kTogether) {
      const auto words = CallWords::await(role.call, layout, role.peers, first, HtCall::kCounts + ranks + e);
#pragma unroll
      for (int q = 0; q < CallWords::kTogether; q++) {
        if (first + q < rank) before += static_cast<int>(words.value[q]);
        all += static_cast<int>(words.value[q]);
      }
    }
    t.index[e] = before + t.choices_before[e];
    t.start[e] = all;
    const int local = e - rank * role.p.shape.local_experts();
    if (role.records() && local >= 0 && local < role.p.shape.local_experts()) role.p.handle.expert_counts[local] = all;
  }
#pragma unroll 1
  for (int r = role.threads() - 1 - role.thread(); r < ranks; r += role.threads()) {
    int before = 0;
#pragma unroll 1
    for (int first = 0; first < rank; first += CallWords::kTogether) {
      const auto words = CallWords::await(role.call, layout, role.peers, first, HtCall::kCounts + r);
#pragma unroll
      for (int q = 0; q < CallWords::kTogether; q++) {
        if (first + q < rank) before += static_cast<int>(words.value[q]);
      }
    }
    t.first_slot[r] = before;
    t.from[r] = word(r, HtCall::kCounts + rank);
    t.layout[r] = word(r, HtCall::kLayout);
    t.capacity[r] = word(r, HtCall::kCapacity);
  }
  if (!role.records()) return;
  if (role.thread() == 0) *role.p.handle.alignment = role.p.output.alignment;
#pragma unroll 1
  for (int i = role.thread(); i < ranks * ranks; i += role.threads()) {
    role.p.handle.counts[i] = word(i / ranks, HtCall::kCounts + i % ranks);
  }
}

// Demand of a rank's experts to the first row of each, in tables.start; a warp a rank.
__device__ __forceinline__ void find_starts(const RouteRole& role) {
  const int local_experts = role.p.shape.local_experts();
#pragma unroll 1
  for (int r = role.warp; r < role.num_ranks(); r += role.threads() / 32) {
    OutputShape output = role.p.output;
    output.layout = static_cast<OutputLayout>(role.tables.layout[r]);
    output.alignment = static_cast<int>(await_call_word(role.call, role.p.layout, role.peers, r, HtCall::kAlignment));
    int* start = role.tables.start + r * local_experts;
    exclusive_sums(local_experts, start, [&](int e) { return static_cast<int>(output.span(start[e])); });
  }
}

// ---- What this rank receives

// One block: the info tensor, and the sizes that the host waits for. The handle has the counts of all.
__device__ __forceinline__ void store_info(const RouteRole& role) {
  EP_SHARED(int, dropped);
  EP_SHARED(int, total);
  const HtRouteParams& p = role.p;
  const OutputShape& output = p.output;
  const int ranks = role.num_ranks(), rank = role.peers.rank;
  const bool expert_rows = has_expert_rows(output.layout);
  const int* start_of = role.tables.start + rank * output.local_experts;
  if (role.thread() == 0) dropped = total = 0;
  __syncthreads();
  const int* from = role.tables.from;
  const auto received_before = [&](int source) {
    int sum = 0;
    for (int s = 0; s < source; s++) sum += from[s];
    return sum;
  };
#pragma unroll 1
  for (int bin = role.thread(); bin < output.bins(); bin += role.threads()) {
    const int demand = expert_rows ? p.handle.expert_counts[bin] : from[bin];
    const int start = expert_rows ? start_of[bin] : received_before(bin);
    const int kept = static_cast<int>(output.kept(start, demand));
    p.info[bin] = kept;
    p.info[output.demand_at() + bin] = demand;
    atomicAdd(&total, kept);
    atomicAdd(&dropped, demand - kept);
  }
  const int last = output.local_experts - 1;
  const int end = expert_rows ? start_of[last] + static_cast<int>(output.span(p.handle.expert_counts[last])) : 0;
#pragma unroll 1
  for (int i = role.thread(); i < output.num_offsets(); i += role.threads()) {
    const int64_t start = i <= last ? start_of[i] : end;
    p.info[output.offsets_at() + i] = static_cast<int>(min(start, output.capacity));
  }
  for (int e = role.thread(); p.host_sizes != nullptr && e < output.local_experts; e += role.threads()) {
    p.host_sizes[2 + e] = p.handle.expert_counts[e];
  }
  if (p.host_sizes != nullptr) __threadfence_system();
  __syncthreads();
  if (role.thread() != 0) return;
  p.info[output.overflow_at()] = dropped;
  p.info[output.total_at()] = total;
  if (dropped > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&role.call.state->found.dropped_rows),
              static_cast<unsigned long long>(dropped));
  }
  if (p.host_sizes == nullptr) return;
  const int slots = received_before(ranks);
  p.host_sizes[0] = expert_rows ? end : slots;
  p.host_sizes[1] = slots;
  int most_tokens = 0;
  for (int source = 0; source < ranks; source++) {
    const uint32_t tokens = await_call_word(role.call, p.layout, role.peers, source, CallRecord::kNumTokens);
    most_tokens = max(most_tokens, static_cast<int>(tokens));
  }
  p.host_sizes[2 + output.local_experts] = most_tokens;
  __threadfence_system();
  *reinterpret_cast<volatile uint64_t*>(p.host_epoch) = role.call.epoch;
}

__device__ __forceinline__ void clear_info(const RouteRole& role) {
  for (int i = role.thread(); i < role.p.output.info_size(); i += role.threads()) role.p.info[i] = 0;
}

// ---- Places of the own tokens

// Counts of each placing warp to what comes before its tokens.
__device__ __forceinline__ void add_up_warps(const RouteRole& role) {
  const RouteTables& t = role.tables;
  const int ranks = role.num_ranks(), experts = role.num_experts();
  const auto scan = [&](int* counts, int stride, int first) {
    for (int warp = 0; warp < role.geometry.place_warps; warp++) {
      const int count = counts[warp * stride];
      counts[warp * stride] = first;
      first += count;
    }
  };
#pragma unroll 1
  for (int e = role.thread(); e < experts; e += role.threads()) scan(t.warp_choices + e, experts, t.index[e]);
#pragma unroll 1
  for (int r = role.threads() - 1 - role.thread(); r < ranks; r += role.threads()) {
    scan(t.warp_rows + r, ranks, t.rows_before[r]);
  }
}

static __device__ __noinline__ void report_invalid_id(const RouteRole& role, int token, int k) {
  note_invalid_id(role.call.state, role.ask_id(token, k), token, k);
}

__device__ __forceinline__ void place_share(const RouteRole& role) {
  const RouteTables& t = role.tables;
  const HtRoutes& own = role.p.handle.own;
  int* choices = t.warp_choices + role.warp * role.num_experts();
  int* rows = t.warp_rows + role.warp * role.num_ranks();
  const unsigned below = (1u << role.lane) - 1;
  for_each_step(role, [&](int token, int k, bool exists, int id) {
    if (exists && id < 0) report_invalid_id(role, token, k);
    const int rank = id >= 0 ? role.geometry.by_local_experts.divide(id) : 0;
    // The choice's number among those of its expert, and the token's among those for its rank. A number is read by all
    // lanes before one moves it on.
    const unsigned same = same_key(id >= 0, id), group = same_key(id >= 0, token * role.num_ranks() + rank);
    const int leader = __ffs(static_cast<int>(group)) - 1;
    const bool leads = id >= 0 && leader == role.lane;
    const unsigned tokens = same_key(leads, rank);
    const int choice = id >= 0 ? choices[id] + __popc(same & below) : 0;
    int number = leads ? rows[rank] + __popc(tokens & below) : 0;
    __syncwarp();
    if (id >= 0 && (same & below) == 0) choices[id] += __popc(same);
    if (leads && (tokens & below) == 0) rows[rank] += __popc(tokens);
    __syncwarp();
    number = __shfl_sync(~0u, number, leader);
    if (!exists) return;
    int32_t row = kNoRow, slot = kNoRow;
    if (id >= 0) {
      OutputShape output = role.p.output;
      output.layout = static_cast<OutputLayout>(t.layout[rank]);
      output.capacity = t.capacity[rank];
      slot = t.first_slot[rank] + number;
      row = has_expert_rows(output.layout)
                ? output.row(role.geometry.by_local_experts.remainder(id, rank), t.start[id], choice)
                : output.row(role.peers.rank, t.first_slot[rank], number);
    }
    const int64_t entry = static_cast<int64_t>(token) * role.p.shape.topk + k;
    own.ids[entry] = id;
    own.rows[entry] = row;
    own.slots[entry] = slot;
  });
}

// ---- Table of contents

__device__ __forceinline__ void ht_route(const KernelArgs<HtRouteParams>& args, BlockPosition at, char* shared) {
  const HtRouteParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(CallContext, call);
  const RouteRole role{{at}, p, args.geometry, peers, call, RouteTables::of(shared, p, args.geometry)};
  const bool is_open = open_ht_call(call, args, Kind::kDispatch, at, !sends_rows(p.steps));
  if (!is_open) {
    if (role.records()) clear_info(role);
    return;
  }
  clear_tables(role);
  if (role.is_first()) clear_next_counters(call);
  __syncthreads();
  count_tokens(role);
  __syncthreads();
  if (role.is_first()) {
    send_call(call, p.layout, peers, HtCall::words(p.shape.num_ranks, p.shape.num_experts),
              [&](int index) { return call_word_of(p, &role.tables, index); });
  }
  count_share(role);
  await_records(call, p.layout, peers);
  take_counts(role);
  if (block_has_failed(call)) {
    if (role.records()) clear_info(role);
    return;
  }
  find_starts(role);
  add_up_warps(role);
  __syncthreads();
  place_share(role);
  if (role.records()) store_info(role);
}

}  // namespace ep
