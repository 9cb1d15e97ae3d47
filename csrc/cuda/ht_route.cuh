// The first half of high-throughput dispatch: the first block counts all tokens and tells the other ranks, each counts
// those before its own share, numbers the share's tokens meanwhile, and places them at their receivers when the other
// ranks' counts are there. The table of contents is ht_route(), at the end.
#pragma once

#include "cuda/ht_count.cuh"
#include "cuda/stamps.cuh"

namespace ep {

// ---- The own share

static __device__ __noinline__ void report_invalid_id(DeviceState* state, int64_t id, int token, int k) {
  note_invalid_id(state, id, token, k);
}

__device__ __forceinline__ void clear_warp_counters(const RouteRole& role) {
  const int count = role.geometry.place_warps * (role.num_ranks() + role.num_experts());
  for (int i = role.thread(); i < count; i += role.threads()) role.tables.warp_rows[i] = 0;
}

// The share's ids, -1 where there is no expert.
__device__ __forceinline__ void load_share(const RouteRole& role) {
  constexpr int kTogether = 4;
  const HtRouteParams& p = role.p;
  const int count = role.chunk_choices(), threads = role.threads();
  const int64_t first_choice = static_cast<int64_t>(role.chunk_begin()) * p.shape.topk;
#pragma unroll 1
  for (int first = role.thread(); first < count; first += kTogether * threads) {
    RawId raw[kTogether];
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      raw[q] = RawId::load(p.topk_idx, p.is_idx64, first_choice + min(first + q * threads, count - 1));
    }
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      const int i = first + q * threads;
      if (i >= count) break;
      const int64_t id = raw[q].below(role.num_experts(), p.is_idx64);
      role.tables.ids[i] = static_cast<int>(id);
      const auto value = p.is_idx64 ? static_cast<int64_t>(static_cast<uint64_t>(raw[q].high) << 32 | raw[q].low)
                                    : static_cast<int32_t>(raw[q].low);
      if (id >= 0 || value == -1) continue;
      const int token = role.geometry.by_topk.divide(i), k = role.geometry.by_topk.remainder(i, token);
      report_invalid_id(role.call.state, value, role.chunk_begin() + token, k);
    }
  }
}

// Calls visit(choice, token, id) with lanes in the order (token, k), choices and tokens counted from the share's first;
// id is -1 where there is no expert, choice is -1 where there is no choice.
template <class Visit>
__device__ __forceinline__ void for_each_step(const RouteRole& role, const Visit& visit) {
  if (role.warp >= role.geometry.place_warps) return;
  const int topk = role.p.shape.topk, step_tokens = role.geometry.step_tokens;
  const int turn = role.geometry.by_topk.divide(role.lane), k = role.geometry.by_topk.remainder(role.lane, turn);
  const int begin = role.warp * role.geometry.warp_tokens;
  const int end = min(role.chunk_end() - role.chunk_begin(), begin + role.geometry.warp_tokens);
  const auto ask = [&](int token) { return role.tables.ids[min(token, end - 1) * topk + k]; };
  if (begin >= end) return;
  int id = ask(begin + turn);
#pragma unroll 1
  for (int first = begin; first < end; first += step_tokens) {
    const int token = first + turn;
    const bool exists = turn < step_tokens && token < end;
    const int next = ask(token + step_tokens);
    visit(exists ? token * topk + k : -1, token, exists ? id : -1);
    id = next;
  }
}

// Lanes whose key is the same; a lane without one stands alone.
__device__ __forceinline__ unsigned same_key(bool has_key, int key) {
  return __match_any_sync(~0u, has_key ? key : static_cast<int>(0x80000000u | lane_id()));
}

__device__ __forceinline__ void count_share(const RouteRole& role) {
  const int ranks = role.num_ranks(), experts = role.num_experts();
  for_each_step(role, [&](int, int token, int id) {
    const int rank = id >= 0 ? role.geometry.by_local_experts.divide(id) : -1;
    if (id >= 0) atomicAdd(role.tables.warp_choices + role.warp * experts + id, 1);
    const unsigned group = same_key(id >= 0, token * ranks + rank);
    if (id >= 0 && __ffs(static_cast<int>(group)) - 1 == role.lane) {
      atomicAdd(role.tables.warp_rows + role.warp * ranks + rank, 1);
    }
  });
}

// Counts of each placing warp to what this rank has before its tokens.
__device__ __forceinline__ void add_up_warps(const RouteRole& role) {
  constexpr int kTogether = 8;
  const RouteTables& t = role.tables;
  const int ranks = role.num_ranks(), experts = role.num_experts(), warps = role.geometry.place_warps;
  const auto scan = [&](int* counts, int stride, int before) {
#pragma unroll 1
    for (int first = 0; first < warps; first += kTogether) {
      int count[kTogether];
#pragma unroll
      for (int q = 0; q < kTogether; q++) count[q] = first + q < warps ? counts[(first + q) * stride] : 0;
#pragma unroll
      for (int q = 0; q < kTogether; q++) {
        if (first + q < warps) counts[(first + q) * stride] = before;
        before += count[q];
      }
    }
  };
  // The first block counted tokens that are not before its own.
#pragma unroll 1
  for (int e = role.thread(); e < experts; e += role.threads()) {
    scan(t.warp_choices + e, experts, role.is_first() ? 0 : t.choices[e]);
  }
#pragma unroll 1
  for (int r = role.threads() - 1 - role.thread(); r < ranks; r += role.threads()) {
    scan(t.warp_rows + r, ranks, role.is_first() ? 0 : t.rows[r]);
  }
}

// Of each choice of the share, its number among this rank's choices of the expert, and its token's among this rank's
// tokens for the expert's rank.
__device__ __forceinline__ void number_share(const RouteRole& role) {
  const RouteTables& t = role.tables;
  int* choices = t.warp_choices + role.warp * role.num_experts();
  int* rows = t.warp_rows + role.warp * role.num_ranks();
  const unsigned below = (1u << role.lane) - 1;
  for_each_step(role, [&](int place, int token, int id) {
    const int rank = id >= 0 ? role.geometry.by_local_experts.divide(id) : 0;
    // A number is read by all lanes before one moves it on.
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
    if (place < 0) return;
    t.choice_numbers[place] = choice;
    t.token_numbers[place] = number;
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
  return static_cast<uint32_t>(tables->choices[count - ranks]);
}

// Adds up the counts of all ranks: before this one, and all. Choices of each expert by all go into tables.start for
// now.
__device__ __forceinline__ void add_up_counts(const RouteRole& role) {
  const RouteTables& t = role.tables;
  const int ranks = role.num_ranks(), rank = role.peers.rank, local_experts = role.p.shape.local_experts();
#pragma unroll 1
  for (int i = role.threads() - 1 - role.thread(); i < ranks + role.num_experts(); i += role.threads()) {
    int before = 0, all = 0;
#pragma unroll 1
    for (int first = 0; first < ranks; first += CallWords::kTogether) {
      const auto words = CallWords::await(role.call, role.p.layout, role.peers, first, HtCall::kCounts + i);
#pragma unroll
      for (int q = 0; q < CallWords::kTogether; q++) {
        if (first + q < rank) before += static_cast<int>(words.value[q]);
        all += static_cast<int>(words.value[q]);
      }
    }
    if (i < ranks) {
      t.first_slot[i] = before;
      continue;
    }
    const int e = i - ranks, local = e - rank * local_experts;
    t.index[e] = before;
    t.start[e] = t.demand[e] = all;
    if (role.records() && local >= 0 && local < local_experts) role.p.handle.expert_counts[local] = all;
  }
}

// Reads what is not added up: a thread a word, and other threads than those that add up or look at records, so that all
// words are asked for at the same time.
__device__ __forceinline__ void take_words(const RouteRole& role) {
  constexpr int kTold = RouteTables::kTold;
  const int ranks = role.num_ranks(), half = role.threads() / 2;
  const int turned = role.thread() < half ? role.thread() + half : role.thread() - half;
  const int count = ranks * (kTold + (role.records() ? ranks : 0));
#pragma unroll 1
  for (int i = turned; i < count; i += role.threads()) {
    const int row = i / ranks, column = i - row * ranks;
    int source = column, index = HtCall::kCounts + role.peers.rank;
    if (row == 1) index = HtCall::kLayout;
    if (row == 2) index = HtCall::kCapacity;
    if (row == 3) index = HtCall::kAlignment;
    if (row == 4) index = CallRecord::kNumTokens;
    if (row >= kTold) {
      source = row - kTold;
      index = HtCall::kCounts + column;
    }
    int* out = row < kTold ? role.tables.from + i : role.p.handle.counts + (i - kTold * ranks);
    *out = static_cast<int>(await_call_word(role.call, role.p.layout, role.peers, source, index));
  }
  if (role.records() && role.thread() == 0) *role.p.handle.alignment = role.p.output.alignment;
}

// Demand of a rank's experts to the first row of each, in tables.start; a warp a rank.
__device__ __forceinline__ void find_starts(const RouteRole& role) {
  const int local_experts = role.p.shape.local_experts();
#pragma unroll 1
  for (int r = role.warp; r < role.num_ranks(); r += role.threads() / 32) {
    OutputShape output = role.p.output;
    output.layout = static_cast<OutputLayout>(role.tables.layout[r]);
    output.alignment = role.tables.alignment[r];
    int* start = role.tables.start + r * local_experts;
    exclusive_sums(local_experts, start, [&](int e) { return static_cast<int>(output.span(start[e])); });
  }
}

// ---- What this rank receives

// One block: the info tensor, and the sizes that the host waits for.
__device__ __forceinline__ void store_info(const RouteRole& role) {
  const HtRouteParams& p = role.p;
  const OutputShape& output = p.output;
  const int ranks = role.num_ranks(), rank = role.peers.rank;
  const bool expert_rows = has_expert_rows(output.layout);
  const int* start_of = role.tables.start + rank * output.local_experts;
  const int* demand_of = role.tables.demand + rank * output.local_experts;
  const int* from = role.tables.from;
  const auto received_before = [&](int source) {
    int sum = 0;
    for (int s = 0; s < source; s++) sum += from[s];
    return sum;
  };
#pragma unroll 1
  for (int bin = role.thread(); bin < output.bins(); bin += role.threads()) {
    const int demand = expert_rows ? demand_of[bin] : from[bin];
    const int start = expert_rows ? start_of[bin] : received_before(bin);
    const int kept = static_cast<int>(output.kept(start, demand));
    p.info[bin] = kept;
    p.info[output.demand_at() + bin] = demand;
    atomicAdd(role.tables.total, kept);
    if (demand > kept) atomicAdd(role.tables.dropped, demand - kept);
  }
  const int last = output.local_experts - 1;
  const int end = expert_rows ? start_of[last] + static_cast<int>(output.span(demand_of[last])) : 0;
#pragma unroll 1
  for (int i = role.thread(); i < output.num_offsets(); i += role.threads()) {
    const int64_t start = i <= last ? start_of[i] : end;
    p.info[output.offsets_at() + i] = static_cast<int>(min(start, output.capacity));
  }
  for (int e = role.thread(); p.host_sizes != nullptr && e < output.local_experts; e += role.threads()) {
    p.host_sizes[2 + e] = demand_of[e];
  }
  if (p.host_sizes != nullptr) __threadfence_system();
  __syncthreads();
  if (role.thread() != 0) return;
  const int dropped = *role.tables.dropped;
  p.info[output.overflow_at()] = dropped;
  p.info[output.total_at()] = *role.tables.total;
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
    most_tokens = max(most_tokens, role.tables.tokens[source]);
  }
  p.host_sizes[2 + output.local_experts] = most_tokens;
  __threadfence_system();
  *reinterpret_cast<volatile uint64_t*>(p.host_epoch) = role.call.epoch;
}

__device__ __forceinline__ void clear_info(const RouteRole& role) {
  for (int i = role.thread(); i < role.p.output.info_size(); i += role.threads()) role.p.info[i] = 0;
}

// ---- Places of the own tokens

__device__ __forceinline__ void place_share(const RouteRole& role) {
  constexpr int kTogether = 3;
  const RouteTables& t = role.tables;
  const HtRoutes& own = role.p.handle.own;
  const int count = role.chunk_choices(), threads = role.threads();
  const int64_t first_choice = static_cast<int64_t>(role.chunk_begin()) * role.p.shape.topk;
#pragma unroll 1
  for (int first = role.thread(); first < count; first += kTogether * threads) {
    int ids[kTogether], choices[kTogether], tokens[kTogether];
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      const int i = min(first + q * threads, count - 1);
      ids[q] = t.ids[i];
      choices[q] = t.choice_numbers[i];
      tokens[q] = t.token_numbers[i];
    }
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      const int i = first + q * threads, id = ids[q];
      if (i >= count) break;
      int32_t row = kNoRow, slot = kNoRow;
      if (id >= 0) {
        const int rank = role.geometry.by_local_experts.divide(id), first_slot = t.first_slot[rank];
        OutputShape output = role.p.output;
        output.layout = static_cast<OutputLayout>(t.layout[rank]);
        output.capacity = t.capacity[rank];
        slot = first_slot + tokens[q];
        row = has_expert_rows(output.layout) ? output.row(role.geometry.by_local_experts.remainder(id, rank),
                                                          t.start[id], t.index[id] + choices[q])
                                             : output.row(role.peers.rank, first_slot, tokens[q]);
      }
      own.ids[first_choice + i] = id;
      own.rows[first_choice + i] = row;
      own.slots[first_choice + i] = slot;
    }
  }
}

// ---- Table of contents

__device__ __forceinline__ void ht_route(const KernelArgs<HtRouteParams>& args, BlockPosition at, char* shared) {
  const HtRouteParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(CallContext, call);
  const RouteRole role{{at},  p,    args.geometry,
                       peers, call, RouteTables::of(shared, p, args.geometry, at.block * args.geometry.chunk_tokens)};
  stamp(Stamp::kStart, peers.rank);
  Ahead ahead = begin_counting(role);
  const bool is_open = open_ht_call(call, args, Kind::kDispatch, at, !sends_rows(p.steps));
  if (!is_open) {
    if (role.records()) clear_info(role);
    return;
  }
  stamp(Stamp::kEpochKnown, peers.rank);
  if (role.is_first()) {
    clear_next_counters(call);
    if (role.warp == 0) send_record(call, p.layout, peers);
  }
  count_all(role, ahead);
  __syncthreads();
  if (role.is_first()) {
    send_call_words(call, p.layout, peers, HtCall::words(p.shape.num_ranks, p.shape.num_experts),
                    [&](int index) { return call_word_of(p, &role.tables, index); });
  }
  stamp(Stamp::kSent, peers.rank);
  clear_warp_counters(role);
  load_share(role);
  __syncthreads();
  count_share(role);
  __syncthreads();
  add_up_warps(role);
  __syncthreads();
  number_share(role);
  stamp(Stamp::kOwnDone, peers.rank);
  await_records(call, p.layout, peers);
  take_words(role);
  add_up_counts(role);
  if (block_has_failed(call)) {
    if (role.records()) clear_info(role);
    return;
  }
  stamp(Stamp::kRoutingKnown, peers.rank);
  find_starts(role);
  __syncthreads();
  if (role.records()) store_info(role);
  place_share(role);
  stamp(Stamp::kEnd, peers.rank);
}

}  // namespace ep
