// Where received rows go. Every receiving block reads the routing of all sources and keeps one bit for each
// (source, token) that wants an expert; the place of a row is the number of bits before its own. No order of arrival
// enters, and no block waits for another of its grid.
#pragma once

#include "cuda/call.cuh"

namespace ep {

// In shared memory. A bin is a local expert, or, in rank layouts, the one bin of all rows.
struct Places {
  uint32_t* bits;     // [bins, words]: bit i of a bin: (source, token) number i = source * M + token has a row there
  uint32_t* ids;      // [R * M, id words]: local expert ids as they travel
  int* tokens;        // [R]
  int* starts;        // [bins + 1] packed: first row of each expert
  int* duplicates;    // != 0: some token names an expert twice, and bits do not tell the whole story
  int words;          // of a bin
  int bins;
  int id_words;

  __device__ static int bins_of(const LlDispatchParams& p) {
    return has_expert_rows(p.output.layout) ? p.output.local_experts : 1;
  }
  EP_HD static int words_of(const Shape& shape) { return ceil_div(shape.num_ranks * shape.max_tokens, 32); }
  // Bytes of shared memory.
  EP_HD static int64_t bytes(const Shape& shape, const OutputShape& output, const IdFormat& ids) {
    const int64_t bins = has_expert_rows(output.layout) ? output.local_experts : 1;
    const int64_t slots = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
    return 4 * (align_up<int64_t>(bins * words_of(shape), 4) + slots * ids.words() +
                align_up<int64_t>(shape.num_ranks + bins + 2, 4));
  }

  __device__ static Places at(char* shared, const LlDispatchParams& p) {
    Places places;
    places.bins = bins_of(p);
    places.words = words_of(p.shape);
    places.id_words = p.layout.ids.words();
    places.ids = reinterpret_cast<uint32_t*>(shared);
    places.bits = places.ids + static_cast<int64_t>(p.shape.num_ranks) * p.shape.max_tokens * places.id_words;
    places.tokens = reinterpret_cast<int*>(places.bits + align_up(places.bins * places.words, 4));
    places.starts = places.tokens + p.shape.num_ranks;
    places.duplicates = places.starts + places.bins + 1;
    return places;
  }

  __device__ __forceinline__ void clear(int thread, int num_threads) const {
    for (int i = thread; i < bins * words; i += num_threads) bits[i] = 0;
    if (thread == 0) *duplicates = 0;
  }

  // Choice k of slot i: the local expert, or ids.none().
  __device__ __forceinline__ uint32_t id(const IdFormat& format, int slot, int k) const {
    const int shift = format.bits == 8 ? 2 : 1;
    return format.get(ids[slot * id_words + (k >> shift)], k & ((1 << shift) - 1));
  }

  // Bits of a bin in [from, to); a whole warp calls.
  __device__ __forceinline__ int count_bits(int bin, int from, int to) const {
    int count = 0;
    for (int w = (from >> 5) + lane_id(); w <= to >> 5 && w < words; w += 32) {
      uint32_t word = bits[bin * words + w];
      if (w == from >> 5) word &= ~0u << (from & 31);
      if (w == to >> 5) word &= (1u << (to & 31)) - 1;
      count += __popc(word);
    }
    return __reduce_add_sync(~0u, count);
  }
  // The same when tokens may name an expert twice: choices of `bin` in slots [from, to).
  __device__ __forceinline__ int count_choices(const LlDispatchParams& p, int bin, int from, int to) const {
    int count = 0;
    for (int slot = from + lane_id(); slot < to; slot += 32) {
      if (slot % p.shape.max_tokens >= tokens[slot / p.shape.max_tokens]) continue;
      for (int k = 0; k < p.shape.topk; k++) count += id(p.layout.ids, slot, k) == static_cast<uint32_t>(bin) ? 1 : 0;
    }
    return __reduce_add_sync(~0u, count);
  }
  __device__ __forceinline__ int count(const LlDispatchParams& p, int bin, int from, int to) const {
    if (*duplicates != 0 && has_expert_rows(p.output.layout)) return count_choices(p, bin, from, to);
    return count_bits(bin, from, to);
  }
};

// Rows that want bin `bin` of the output: an expert, or in rank layouts a source rank. A warp calls.
__device__ __forceinline__ int demand_of(const LlDispatchParams& p, const Places& places, int bin) {
  if (has_expert_rows(p.output.layout)) {
    return places.count(p, bin, 0, p.shape.num_ranks * p.shape.max_tokens);
  }
  return places.count(p, 0, bin * p.shape.max_tokens, (bin + 1) * p.shape.max_tokens);
}

// The row of choice k (rank layouts: of the token) of `slot`; every lane of the warp passes its own choice `wanted`
// (its local expert, or none) and gets its own row. Lanes without one get kNoRow.
__device__ __forceinline__ int32_t rows_of(const LlDispatchParams& p, const Places& places, int slot, bool wanted,
                                           uint32_t expert) {
  const int lane = lane_id();
  unsigned mask = __ballot_sync(~0u, wanted);
  int32_t row = kNoRow;
  if (!has_expert_rows(p.output.layout)) {
    const int source = slot / p.shape.max_tokens;
    const int from = p.output.layout == OutputLayout::kRankMajor ? source * p.shape.max_tokens : 0;
    const int index = mask != 0 ? places.count_bits(0, from, slot) : 0;
    return wanted ? p.output.row(source, 0, index) : kNoRow;
  }
  for (; mask != 0; mask &= mask - 1) {
    const int k = __ffs(mask) - 1;
    const uint32_t bin = __shfl_sync(~0u, expert, k);
    int index = places.count(p, bin, 0, slot);
    if (*places.duplicates != 0) {  // earlier choices of the same token
      index += __popc(__ballot_sync(~0u, wanted && expert == bin && lane < k));
    }
    const int start = p.output.layout == OutputLayout::kPacked ? places.starts[bin] : 0;
    if (lane == k) row = p.output.row(bin, start, index);
  }
  return row;
}

// Waits for the routing of slot (source, token) and puts it into the places. One thread calls.
__device__ __forceinline__ void take_routing(const LlDispatchParams& p, const LsaPeers& peers, const CallContext& call,
                                             const Places& places, int source, int token) {
  const int slot = source * p.shape.max_tokens + token;
  const auto* record = peers.local<uint64_t>(p.layout.record(call.bank, source)) + kTokensWord;
  const auto* message = peers.local<ulonglong2>(p.layout.id_words(call.bank, source, token));
  // The last slot's thread learns the source's number of tokens, so that every rank is heard of in every call.
  const bool needs_record = token == p.shape.max_tokens - 1;
  Patience patience;
  for (int pair = 0; pair < places.id_words / 2; pair++) {
    ulonglong2 words = ptx::ld_relaxed_sys(message + pair);
    uint64_t count = ptx::ld_relaxed_sys(record);
    while (true) {
      const bool knows_count = is_tagged(count, call.tag);
      const bool is_absent = knows_count && token >= static_cast<int>(static_cast<uint32_t>(count));
      if (needs_record && pair == 0 && knows_count) {
        places.tokens[source] = min(static_cast<int>(static_cast<uint32_t>(count)), p.shape.max_tokens);
      }
      if (is_absent) {
        words = make_ulonglong2(~0ull, ~0ull);
        break;
      }
      const bool is_here = is_tagged(words.x, call.tag) && is_tagged(words.y, call.tag);
      if (is_here && (knows_count || !needs_record)) break;
      if (patience.is_over(call, Phase::kRouting, source, call.tag, words.x >> 32)) {
        words = make_ulonglong2(~0ull, ~0ull);
        if (needs_record) places.tokens[source] = 0;
        break;
      }
      words = ptx::ld_relaxed_sys(message + pair);
      count = ptx::ld_relaxed_sys(record);
    }
    places.ids[slot * places.id_words + 2 * pair] = static_cast<uint32_t>(words.x);
    places.ids[slot * places.id_words + 2 * pair + 1] = static_cast<uint32_t>(words.y);
  }
}

// The same of an own token, straight from the caller's ids.
__device__ __forceinline__ void take_own_routing(const LlDispatchParams& p, const Places& places, int rank, int token) {
  const int slot = rank * p.shape.max_tokens + token;
  const IdFormat& format = p.layout.ids;
  if (token == 0) places.tokens[rank] = p.num_tokens;
  for (int w = 0; w < places.id_words; w++) {
    uint32_t word = ~0u;
    for (int i = 0; i < format.per_word() && token < p.num_tokens; i++) {
      const int k = w * format.per_word() + i;
      if (k >= p.shape.topk) break;
      const int64_t id = load_id(p.topk_idx, p.is_idx64, static_cast<int64_t>(token) * p.shape.topk + k);
      if (!p.shape.valid(id) || p.shape.owner(static_cast<int>(id)) != rank) continue;
      const uint32_t none = format.none() << (i * format.bits);
      word = (word & ~none) | static_cast<uint32_t>(p.shape.local_expert(static_cast<int>(id))) << (i * format.bits);
    }
    places.ids[slot * places.id_words + w] = word;
  }
}

__device__ __forceinline__ void set_bits(const LlDispatchParams& p, const Places& places, int slot) {
  const IdFormat& format = p.layout.ids;
  const bool expert_rows = has_expert_rows(p.output.layout);
  for (int k = 0; k < p.shape.topk; k++) {
    const uint32_t id = places.id(format, slot, k);
    if (id >= static_cast<uint32_t>(p.output.local_experts)) continue;
    const uint32_t bit = 1u << (slot & 31);
    const uint32_t before = atomicOr(&places.bits[(expert_rows ? id : 0) * places.words + (slot >> 5)], bit);
    if ((before & bit) != 0 && expert_rows) *places.duplicates = 1;
  }
}

// All receiving threads of a block call, after clear() and a barrier, and before another barrier.
__device__ __forceinline__ void build_places(const LlDispatchParams& p, const LsaPeers& peers, const CallContext& call,
                                             const Places& places, int thread, int num_threads) {
  const bool own_is_local = sends(p.half);
  for (int slot = thread; slot < p.shape.num_ranks * p.shape.max_tokens; slot += num_threads) {
    const int source = slot / p.shape.max_tokens, token = slot % p.shape.max_tokens;
    if (source == peers.rank && own_is_local) {
      take_own_routing(p, places, source, token);
    } else {
      take_routing(p, peers, call, places, source, token);
    }
    set_bits(p, places, slot);
  }
}

// packed: the first row of every expert. One warp calls; a barrier must follow.
__device__ __forceinline__ void find_starts(const LlDispatchParams& p, const Places& places) {
  int64_t start = 0;
  for (int bin = 0; bin < places.bins; bin++) {
    if (lane_id() == 0) places.starts[bin] = static_cast<int>(min(start, static_cast<int64_t>(INT32_MAX)));
    start += p.output.span(demand_of(p, places, bin));
  }
  if (lane_id() == 0) places.starts[places.bins] = static_cast<int>(min(start, static_cast<int64_t>(INT32_MAX)));
}

}  // namespace ep
