// The first kernel of a high-throughput dispatch. Each block numbers and counts the tokens of its own share, and gives
// the counts to the other blocks of its rank. The first block adds all shares up and sends the sums to the other ranks.
// When the counts of all ranks have come, each block computes the places of its tokens at their receivers. The table of
// contents is ht_route(), at the end.
#pragma once

#include "cuda/ht/common/messages.cuh"
#include "cuda/ht/common/recorded.cuh"
#include "cuda/ht/dispatch/info.cuh"
#include "cuda/ht/dispatch/route_count.cuh"
#include "cuda/testing/stamps.cuh"
#if defined(EP_NETWORK)
#include "cuda/ht/links/links.cuh"
#endif

namespace ep {
inline namespace EP_KERNELS {

// ---- The other ranks

// Adds up the counts of all ranks: before this one, and all. Choices of each expert by all go into tables.start for
// now.
__device__ __forceinline__ void add_up_counts(const RouteRole& role) {
  const RouteTables& t = role.tables;
  const int ranks = role.num_ranks(), rank = role.peers.rank, local_experts = role.local_experts();
#pragma unroll 1
  for (int i = role.last_first(); i < ranks + role.num_experts(); i += role.threads()) {
    const auto sums = WordSums::await(role.op, role.p.offsets, role.peers, HtMessage::kCounts + i);
    t.before[role.count_of_word(i)] = sums.before;
    if (i < ranks) continue;
    const int e = i - ranks, local = e - rank * local_experts;
    t.start[e] = t.demand[e] = sums.all;
    if (role.records() && local >= 0 && local < local_experts) role.p.handle.expert_counts[local] = sums.all;
  }
}

// Reads what is not added up: a thread for each word, and other threads than those that add up or compare headers, so
// that all words are loaded at the same time.
__device__ __forceinline__ void read_words(const RouteRole& role) {
  constexpr int kNumAnnounced = RouteTables::kNumAnnounced;
  const int ranks = role.num_ranks(), half = role.threads() / 2;
  const int turned = role.thread() < half ? role.thread() + half : role.thread() - half;
  const int count = ranks * (kNumAnnounced + (role.records() ? ranks : 0));
#pragma unroll 1
  for (int i = turned; i < count; i += role.threads()) {
    const int row = i / ranks, column = i - row * ranks;
    int source = column, index = HtMessage::kLayout;
    if (row == 1) index = HtMessage::kCapacity;
    if (row == 2) index = HtMessage::kAlignment;
    if (row >= kNumAnnounced) {
      source = row - kNumAnnounced;
      index = HtMessage::kCounts + column;
    }
    int* out = row < kNumAnnounced ? role.tables.layout + i : role.p.handle.counts + (i - kNumAnnounced * ranks);
    *out = static_cast<int>(await_message_word(role.op, role.p.offsets, role.peers, source, index));
    if (row == 0 && has_expert_rows(static_cast<OutputLayout>(*out))) *role.tables.has_expert_rows = 1;
  }
  if (role.records() && role.thread() == 0) {
    *role.p.handle.alignment = role.p.output.alignment;
    *role.p.handle.dispatch = static_cast<int32_t>(role.op.tag);
  }
}

// OutputShape::span() in 32 bits, as a division of 64 takes 100 instructions.
__device__ __forceinline__ uint32_t span_of(OutputLayout layout, int alignment, int demand) {
  const auto rows = static_cast<uint32_t>(demand), unit = static_cast<uint32_t>(alignment);
  return layout == OutputLayout::kPacked ? (rows + unit - 1) / unit * unit : rows;
}

// Demand of a rank's experts to the first row of each, in tables.start; a warp a rank.
__device__ __forceinline__ void find_starts(const RouteRole& role) {
  const int local_experts = role.local_experts();
#pragma unroll 1
  for (int r = role.warp; r < role.num_ranks(); r += role.threads() / 32) {
    const auto layout = static_cast<OutputLayout>(role.tables.layout[r]);
    const int alignment = role.tables.alignment[r];
    int* start = role.tables.start + r * local_experts;
    exclusive_sums(local_experts, start, [&](int e) { return span_of(layout, alignment, start[e]); });
  }
}

// ---- If no rows are sent: what this rank will receive, by a warp of one block

struct Received {
  const RouteRole& role;
  const int ranks = role.num_ranks(), local_experts = role.local_experts();
  const int* start = role.tables.start + role.peers.rank * local_experts;  // of the experts here
  const int* demand = role.tables.demand + role.peers.rank * local_experts;

  __device__ __forceinline__ int from(int source) const {
    return role.p.handle.counts[source * ranks + role.peers.rank];
  }
  __device__ __forceinline__ int64_t slots_before(int source) const {
    return first_slot(role.p.handle.counts, ranks, source, role.peers.rank);
  }
  // Rows of all experts, and gaps between them.
  __device__ __forceinline__ int64_t end_of_experts() const {
    const int last = local_experts - 1;
    return start[last] + static_cast<int64_t>(span_of(role.p.output.layout, role.p.output.alignment, demand[last]));
  }
  __device__ __forceinline__ int64_t start_of(int bin) const {
    if (has_expert_rows(role.p.output.layout)) return bin < local_experts ? start[bin] : end_of_experts();
    return slots_before(bin);
  }
  __device__ __forceinline__ void store() const {
    const OutputShape& output = role.p.output;
    const bool expert_rows = has_expert_rows(output.layout);
    store_info(
        output, role.p.info, role.op, [&](int bin) { return expert_rows ? demand[bin] : from(bin); },
        [&](int bin) { return start_of(bin); });
  }
  // What the host waits for before it makes the outputs of exact sizes.
  __device__ __forceinline__ void tell_host() const {
    const HtRouteParams& p = role.p;
    uint32_t most_tokens = 0;
#pragma unroll 1
    for (int source = role.lane; source < ranks; source += 32) {
      most_tokens = max(most_tokens, await_message_word(role.op, p.offsets, role.peers, source, OpHeader::kNumTokens));
    }
    most_tokens = __reduce_max_sync(~0u, most_tokens);
    for (int e = role.lane; e < local_experts; e += 32) p.host_sizes[2 + e] = demand[e];
    __threadfence_system();
    __syncwarp();
    if (role.lane != 0) return;
    const int64_t slots = slots_before(ranks);
    p.host_sizes[0] = has_expert_rows(p.output.layout) ? end_of_experts() : slots;
    p.host_sizes[1] = slots;
    p.host_sizes[2 + local_experts] = most_tokens;
    __threadfence_system();
    *reinterpret_cast<volatile uint64_t*>(p.host_epoch) = role.op.epoch;
  }
};

// ---- Places of the own tokens

// "No expert" has counts too, so that entries without a choice take the same path to the end.
__device__ __forceinline__ void place_steps(const RouteRole& role, const WarpShare& share, const Steps& steps) {
  const RouteTables& t = role.tables;
  const bool expert_rows = *t.has_expert_rows != 0;
#pragma unroll
  for (int q = 0; q < Steps::kCount; q++) {
    const int id = steps.id[q], rank = role.rank_of(id), choice = steps.first + q * share.choices;
    const int slot = t.before[role.count_of_rank(rank)] + steps.row[q], capacity = t.capacity[rank];
    const auto layout = static_cast<OutputLayout>(t.layout[rank]);
    const bool is_flat = layout == OutputLayout::kFlat;
    int row = is_flat ? slot : role.peers.rank * role.p.shape.max_tokens + steps.row[q];
    if (is_flat && slot >= capacity) row = kDroppedRow;
    if (expert_rows && has_expert_rows(layout)) {
      OutputShape output = role.p.output;
      output.layout = layout;
      output.capacity = capacity;
      row = output.row(role.geometry.by_local_experts.remainder(id, rank), t.start[id], t.before[id] + steps.choice[q]);
    }
    if (!share.exists(choice)) continue;
    const bool has_expert = id < role.num_experts();
    role.p.handle.own.rows[choice] = has_expert ? row : kNoRow;
    role.p.handle.own.slots[choice] = has_expert ? slot : kNoRow;
  }
}

// From the last steps, which are at hand and finished, to the first.
__device__ __forceinline__ void place_share(const RouteRole& role, const WarpShare& share, Steps steps) {
  if (share.is_empty()) return;
#pragma unroll 1
  while (true) {
    place_steps(role, share, steps);
    if (steps.first == share.begin) return;
    steps = load_steps(role, share, steps.first - Steps::kCount * share.choices);
    finish_numbers(role, share, steps);
  }
}

// ---- Between domains, by the first block

#if defined(EP_NETWORK)
// is_all: no rows follow.
template <class WordOf>
__device__ __forceinline__ void cross_with_message(const RouteRole& role, int words, const WordOf& word_of,
                                                   bool is_all) {
  clear_next_rail_counters(role.op, role.part.rail);
  if (is_all) {
    post_nothing(role.op, role.part, kFirstChunkChannel, kHtRailChunks, role.thread(), role.threads());
  }
  exchange_messages(role.op, role.p.offsets, role.peers, role.part, words, word_of);
}
#endif

// ---- Table of contents

// A file of kernels has one set of stamps. Between domains this kernel shares a file with the next, whose they are.
__device__ __forceinline__ void stamp_route(Stamp phase, int rank) {
  if (!kCrossesDomains) stamp(phase, rank);
}

// kExpertRows: this rank's output has. Then choices of experts are numbered at once, as its peers' will, too.
template <bool kExpertRows>
__device__ __forceinline__ void route_tokens(const HtArgs<HtRouteParams>& args, BlockPosition at, char* shared) {
  const HtRouteParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(HtOpContext, op);
  const RouteRole role{
      {at}, args.state, p, args.geometry, peers, op, RouteTables::of(shared, p, args.geometry), HtRailPart::of(args)};
  stamp_route(Stamp::kStart, peers.rank);
  ptx::wait_for_prerequisites();
  record_begin(p.recorded, role);
  const WarpShare share = WarpShare::of(role);
  RawSteps raw;
  if (!share.is_empty()) raw = share.prefetch(role, share.begin);
  clear_counts(role);
  __syncthreads();
  // The first warp loads the epoch meanwhile.
  Steps last_steps = number_share<kExpertRows, true>(role, share, raw);
  stamp_route(Stamp::kOwnDone, peers.rank);
  const bool is_all = !sends_rows(p.variant);  // of the operation: no kernel follows that would store the info tensor
  if (!open_ht_op(op, args, Kind::kDispatch, at, true, is_all)) {
    if (is_all && role.warp == 0) clear_info(p.output, p.info);
    return;
  }
  ptx::launch_dependents();  // it advances the epoch, which all blocks have read now
  stamp_route(Stamp::kEpochKnown, peers.rank);
  if (role.is_first() && role.warp == 0) {
    send_header(op, p.offsets, peers);
  }
  tell_blocks<kExpertRows>(role);
  if (__syncthreads_or(!hear_blocks<kExpertRows>(role))) {
    count_shares(role);
    __syncthreads();
  }
  if (role.is_first()) {
    const int words = HtMessage::words(p.shape.num_ranks, p.shape.num_experts);
    const auto word_of = [&](int index) {
      if (index < HtMessage::kCounts) return message_word_of(p, index);
      return static_cast<uint32_t>(role.tables.sums[role.count_of_word(index - HtMessage::kCounts)]);
    };
    send_message_words(op, p.offsets, peers, words, word_of);
    if (!is_all) {
      record_counts(p.recorded, role, words - HtMessage::kCounts,
                    [&](int i) { return static_cast<int32_t>(word_of(HtMessage::kCounts + i)); });
    }
    clear_next_counters(op, role.num_ranks());
#if defined(EP_NETWORK)
    cross_with_message(role, words, word_of, is_all);
#endif
  }
  if (!share.is_empty()) {
    finish_numbers(role, share, last_steps);
    store_ids(role, share, last_steps);
  }
  stamp_route(Stamp::kSent, peers.rank);
  await_headers(op, p.offsets, peers);
  read_words(role);
  add_up_counts(role);
  if (block_has_failed(op)) {
    if (is_all && role.warp == 0) clear_info(p.output, p.info);
    return;
  }
  stamp_route(Stamp::kRoutingKnown, peers.rank);
  if (*role.tables.has_expert_rows != 0) {
    if constexpr (!kExpertRows) last_steps = number_again(role, share);
    find_starts(role);
    __syncthreads();
  }
  if (role.warp > 0) {
    place_share(role, share, last_steps);
  } else if (is_all && role.records()) {
    const Received received{role};
    received.store();
    if (p.host_sizes != nullptr) received.tell_host();
  }
#if defined(EP_NETWORK)
  if (is_all && role.is_first() && role.warp == 0) await_channels(op, role.part, kFirstChunkChannel, kHtRailChunks);
#endif
  stamp_route(Stamp::kEnd, peers.rank);
}

template <bool kExpertRows>
__device__ __forceinline__ void ht_route(const HtArgs<HtRouteParams>& args, BlockPosition at, char* shared) {
  route_tokens<kExpertRows>(args, at, shared);
  if (!sends_rows(args.params.variant)) record_end(args.params.recorded, at);
}

}  // namespace EP_KERNELS
}  // namespace ep
