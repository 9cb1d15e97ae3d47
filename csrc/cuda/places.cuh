// Where received rows go. Every receiving block reads the routing of all sources and keeps one bit for each
// (source, token) that wants an expert; the place of a row is the number of bits before its own. No order of arrival
// enters, and no block waits for another of its grid.
#pragma once

#include "cuda/call.cuh"

namespace ep {

// In shared memory. A bin is a local expert, or, in rank layouts, the one bin of all rows.
struct Places {
  uint32_t* bits;   // [bins, words]: bit i of a bin: (source, token) number i = source * M + token has a row there
  uint32_t* ids;    // [R * M, id words]: local expert ids as they travel
  int* tokens;      // [R]
  int* starts;      // [bins + 1] packed: first row of each expert
  int* duplicates;  // != 0: some token names an expert twice, and bits do not tell the whole story
  int words;        // of a bin
  int bins;
  int id_words;

  __device__ static int bins_of(const LlDispatchParams& p) {
    return has_expert_rows(p.output.layout) ? p.output.local_experts : 1;
  }
  // Odd, so that threads that look at one word of many bins use different banks.
  EP_HD static int words_of(const Shape& shape) { return ceil_div(shape.num_ranks * shape.max_tokens, 32) | 1; }
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
#pragma unroll 1
    for (int i = thread; i < bins * words; i += num_threads) bits[i] = 0;
    if (thread == 0) *duplicates = 0;
  }

  // Choice k of slot i: the local expert, or more than any.
  __device__ __forceinline__ uint32_t id(const IdFormat& format, int slot, int k) const {
    return format.bits == 8 ? ids[slot * id_words + (k >> 2)] >> (k & 3) * 8 & 0xFF
                            : ids[slot * id_words + (k >> 1)] >> (k & 1) * 16 & 0xFFFF;
  }

  // Bits of a bin in slots [from, to).
  __device__ __forceinline__ int count_bits(int bin, int from, int to) const {
    const uint32_t* row = bits + bin * words;
    uint32_t mask = ~0u << (from & 31);
    int count = 0, w = from >> 5;
#pragma unroll 2
    for (; w < to >> 5; w++, mask = ~0u) count += __popc(row[w] & mask);
    return (to & 31) == 0 ? count : count + __popc(row[w] & mask & ((1u << (to & 31)) - 1));
  }
};

// Choices of `bin` in slots [from, to), for tokens that may name an expert twice.
static __device__ __noinline__ int count_choices(const LlDispatchParams& p, const Places places, int bin, int from,
                                                 int to) {
  int count = 0;
#pragma unroll 1
  for (int slot = from; slot < to; slot++) {
    if (slot % p.shape.max_tokens >= places.tokens[slot / p.shape.max_tokens]) continue;
#pragma unroll 1
    for (int k = 0; k < p.shape.topk; k++) {
      count += places.id(p.layout.ids, slot, k) == static_cast<uint32_t>(bin) ? 1 : 0;
    }
  }
  return count;
}

// Rows of an expert from slots [from, to).
__device__ __forceinline__ int count_rows(const LlDispatchParams& p, const Places& places, int bin, int from, int to) {
  return *places.duplicates != 0 ? count_choices(p, places, bin, from, to) : places.count_bits(bin, from, to);
}

// Rows that want bin `bin` of the output: an expert, or in rank layouts a source rank.
static __device__ __noinline__ int demand_of(const LlDispatchParams& p, const Places places, int bin) {
  const int max_tokens = p.shape.max_tokens;
  if (has_expert_rows(p.output.layout)) return count_rows(p, places, bin, 0, p.shape.num_ranks * max_tokens);
  return places.count_bits(0, bin * max_tokens, (bin + 1) * max_tokens);
}

// The row of a choice of `slot`, one a lane (rank layouts: the token's); kNoRow for lanes without. A whole warp calls.
__device__ __forceinline__ int32_t row_of(const LlDispatchParams& p, const Places& places, int source, int slot,
                                          bool wanted, uint32_t expert) {
  if (!has_expert_rows(p.output.layout)) {
    const int from = p.output.layout == OutputLayout::kRankMajor ? source * p.shape.max_tokens : 0;
    return wanted ? p.output.row(source, 0, places.count_bits(0, from, slot)) : kNoRow;
  }
  int earlier = 0;  // choices of the same token
  if (*places.duplicates != 0) {
#pragma unroll 1
    for (int k = 0; k < p.shape.topk; k++) {
      const bool is_same = __shfl_sync(~0u, expert, k) == expert;
      earlier += is_same && k < lane_id() ? 1 : 0;
    }
  }
  if (!wanted) return kNoRow;
  const int start = p.output.layout == OutputLayout::kPacked ? places.starts[expert] : 0;
  return p.output.row(expert, start, count_rows(p, places, expert, 0, slot) + earlier);
}

// Keeps a word of ids, and sets their bits.
__device__ __forceinline__ void take_ids(const LlDispatchParams& p, const Places& places, int slot, int index,
                                         uint32_t word) {
  places.ids[slot * places.id_words + index] = word;
  const int bits = p.layout.ids.bits;
  const uint32_t none = bits == 8 ? 0xFF : 0xFFFF;
  const bool expert_rows = has_expert_rows(p.output.layout);
#pragma unroll 1
  for (int shift = 0; shift < 32; shift += bits) {
    const uint32_t id = word >> shift & none;
    if (id >= static_cast<uint32_t>(p.output.local_experts)) continue;
    const uint32_t bit = 1u << (slot & 31);
    const uint32_t before = atomicOr(&places.bits[(expert_rows ? id : 0) * places.words + (slot >> 5)], bit);
    if ((before & bit) != 0 && expert_rows) *places.duplicates = 1;
  }
}

// Waits for the routing of slot (source, token) and puts it into the places. One thread calls.
__device__ __forceinline__ void take_routing(const LlDispatchParams& p, const LsaPeers& peers, const CallContext& call,
                                             const Places& places, int source, int token) {
  const int slot = source * p.shape.max_tokens + token;
  const auto* record = peers.local<uint64_t>(p.layout.record(call.bank, source)) + CallRecord::kNumTokens;
  const auto* message = peers.local<ulonglong2>(p.layout.id_words(call.bank, source, token));
  // The last slot's thread learns the source's number of tokens, so that every rank is heard of in every call.
  const bool needs_record = token == p.shape.max_tokens - 1;
  Patience patience;
#pragma unroll 1
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
    take_ids(p, places, slot, 2 * pair, static_cast<uint32_t>(words.x));
    take_ids(p, places, slot, 2 * pair + 1, static_cast<uint32_t>(words.y));
  }
}

// All receiving threads of a block call, after clear() and a barrier, and before another barrier.
__device__ __forceinline__ void build_places(const LlDispatchParams& p, const LsaPeers& peers, const CallContext& call,
                                             const Places& places, int thread, int num_threads) {
#pragma unroll 1
  for (int slot = thread; slot < p.shape.num_ranks * p.shape.max_tokens; slot += num_threads) {
    const int source = slot / p.shape.max_tokens, token = slot % p.shape.max_tokens;
    take_routing(p, peers, call, places, source, token);
  }
}

// packed: the first row of every expert. One warp calls; a barrier must follow.
static __device__ __noinline__ void find_starts(const LlDispatchParams& p, const Places places) {
  int64_t start = 0;
#pragma unroll 1
  for (int first = 0; first < places.bins; first += 32) {
    const int bin = first + lane_id();
    const int64_t span = bin < places.bins ? p.output.span(demand_of(p, places, bin)) : 0;
    int64_t end = span;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t before = __shfl_up_sync(~0u, end, offset);
      if (lane_id() >= offset) end += before;
    }
    end += start;
    if (bin < places.bins) places.starts[bin] = static_cast<int>(min(end - span, static_cast<int64_t>(INT32_MAX)));
    start = __shfl_sync(~0u, end, 31);
  }
  if (lane_id() == 0) places.starts[places.bins] = static_cast<int>(min(start, static_cast<int64_t>(INT32_MAX)));
}

}  // namespace ep
