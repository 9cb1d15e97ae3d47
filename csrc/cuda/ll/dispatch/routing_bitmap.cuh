// Where received rows go. Every receiving block reads the routing of all sources and keeps one bit for each (source,
// token) that wants an expert; the place of a row is the number of bits before its own. The order of arrival does not
// matter, and no block waits for another of its grid.
#pragma once

#include "cuda/device/scans.cuh"
#include "cuda/ll/common/geometry.h"
#include "cuda/ll/common/op_context.cuh"
#include "cuda/ll/dispatch/mask_consensus.cuh"

namespace ep {
inline namespace EP_KERNELS {

struct RoutingBitmap {
  uint32_t* memory;  // shared, RoutingBitmapShape::bytes of it
  const RoutingBitmapShape& shape;
  // Of the memory and of the first bin's bits, in registers, so that nothing computes them after a wait for routing.
  ptx::SharedAddress address, bits_address;

  enum Total { kMostTokens, kDuplicates, kKept, kDropped, kBlocks, kInfoWarps, kNumTotals };
  static_assert(kNumTotals <= RoutingBitmapShape::kIdsAt);

  __device__ __forceinline__ RoutingBitmap(char* shared, const RoutingBitmapShape& a_shape)
      : memory(reinterpret_cast<uint32_t*>(shared)),
        shape(a_shape),
        address(ptx::opaque(ptx::shared_address(memory))),
        bits_address(ptx::opaque(ptx::shared_address(bits(0)))) {}

  // bit i of a bin: slot i has a row there
  __device__ __forceinline__ uint32_t* bits(int bin) const { return memory + shape.bits_at + bin * shape.words; }
  __device__ __forceinline__ int& tokens(int source) const {
    return reinterpret_cast<int*>(memory)[shape.tokens_at + source];
  }
  // packed: the first row of an expert
  __device__ __forceinline__ int& start(int bin) const { return reinterpret_cast<int*>(memory)[shape.starts_at + bin]; }
  __device__ __forceinline__ int& total(Total which) const { return reinterpret_cast<int*>(memory)[which]; }
  // Some token names an expert twice, and bits do not tell the whole story.
  __device__ __forceinline__ bool has_duplicates() const {
    uint32_t duplicates;
    ptx::ld_shared(address + kDuplicates * 4, duplicates);
    return duplicates != 0;
  }

  __device__ __forceinline__ void clear(int thread, int num_threads) const {
#pragma unroll 1
    for (int i = thread; i < shape.bins * shape.words; i += num_threads) memory[shape.bits_at + i] = 0;
    if (thread < kNumTotals) memory[thread] = 0;
  }

  // Choice k of a slot: the local expert, or more than any.
  __device__ __forceinline__ uint32_t id(const IdFormat& format, int slot, int k) const {
    const uint32_t* words = memory + RoutingBitmapShape::kIdsAt + slot * shape.id_words;
    return format.bits == 8 ? words[k >> 2] >> (k & 3) * 8 & 0xFF : words[k >> 1] >> (k & 1) * 16 & 0xFFFF;
  }

  // Slots [from, to) of any bin, so that its bits can be counted: worked out before they are known. Where `to` ends a
  // word, the word behind it is read as well and nothing of it counts; behind the last bin stands `tokens`.
  struct Span {
    ptx::SharedAddress at;  // of bin 0
    int words;              // before the last one
    uint32_t first, last;   // what counts of the first word, and of the last

    // kUnroll: more code, where the result is needed soon.
    template <int kUnroll = 1>
    __device__ __forceinline__ int count_bits(const RoutingBitmap& bitmap, int bin) const {
      ptx::SharedAddress word_at = at + bin * bitmap.shape.words * 4;
      uint32_t mask = first, word;
      int count = 0;
#pragma unroll kUnroll
      for (int w = 0; w < words; w++, word_at += 4, mask = ~0u) {
        ptx::ld_shared(word_at, word);
        count += __popc(word & mask);
      }
      ptx::ld_shared(word_at, word);
      return count + __popc(word & mask & last);
    }
  };
  __device__ __forceinline__ Span span(int from, int to) const {
    return {bits_address + (from >> 5) * 4, (to >> 5) - (from >> 5), ~0u << (from & 31), (1u << (to & 31)) - 1};
  }
  __device__ __forceinline__ int count_bits(int bin, int from, int to) const {
    return span(from, to).count_bits(*this, bin);
  }
  // Of slots [from, to), those that have a row in any bin. A warp calls.
  __device__ __forceinline__ int count_slots(int from, int to) const {
    int count = 0;
#pragma unroll 1
    for (int word = from >> 5; word * 32 < to; word++) {
      uint32_t any = 0;
#pragma unroll 1
      for (int bin = lane_id(); bin < shape.bins; bin += 32) any |= bits(bin)[word];
      any = __reduce_or_sync(~0u, any);
      if (word == from >> 5) any &= ~0u << (from & 31);
      if (word == to >> 5) any &= (1u << (to & 31)) - 1;
      count += __popc(any);
    }
    return count;
  }
};

// Choices of `bin` in slots [from, to), for tokens that may name an expert twice.
static __device__ __noinline__ int count_choices(const LlDispatchParams& p, const RoutingBitmap bitmap, int bin,
                                                 int from, int to) {
  int count = 0;
#pragma unroll 1
  for (int slot = from; slot < to; slot++) {
    if (slot % p.shape.max_tokens >= bitmap.tokens(slot / p.shape.max_tokens)) continue;
#pragma unroll 1
    for (int k = 0; k < p.shape.topk; k++) {
      count += bitmap.id(p.offsets.ids, slot, k) == static_cast<uint32_t>(bin) ? 1 : 0;
    }
  }
  return count;
}

// Rows of an expert from slots [from, to).
__device__ __forceinline__ int count_rows(const LlDispatchParams& p, const RoutingBitmap& bitmap, bool has_duplicates,
                                          int bin, int from, int to) {
  return has_duplicates ? count_choices(p, bitmap, bin, from, to) : bitmap.count_bits(bin, from, to);
}

// Rows that want bin `bin` of the output: an expert, or in rank layouts a source rank.
template <OutputLayout kLayout>
__device__ __forceinline__ int demand_of(const LlDispatchParams& p, const RoutingBitmap& bitmap, int bin) {
  if constexpr (has_expert_rows(kLayout)) {
    return count_rows(p, bitmap, bitmap.has_duplicates(), bin, 0, bitmap.shape.slots);
  }
  return bitmap.count_bits(0, bin * p.shape.max_tokens, (bin + 1) * p.shape.max_tokens);
}

// OutputShape::row() in 32 bits: rows and places stay below 2^31 (OutputShape::make), sums of two below 2^32.
template <OutputLayout kLayout>
__device__ __forceinline__ int32_t output_row(const LlDispatchParams& p, int bin, uint32_t start, uint32_t index) {
  const auto limit =
      static_cast<uint32_t>(kLayout == OutputLayout::kRankMajor ? p.shape.max_tokens : p.output.capacity);
  const uint32_t place = has_parts(kLayout) ? index : start + index;
  if (place >= limit) return kDroppedRow;
  return static_cast<int32_t>(has_parts(kLayout) ? bin * limit + place : place);
}

// OutputShape::kept() in 32 bits.
template <OutputLayout kLayout>
__device__ __forceinline__ int kept_rows(const LlDispatchParams& p, int start, int demand) {
  if constexpr (kLayout == OutputLayout::kRankMajor) return min(demand, p.shape.max_tokens);
  const auto capacity = static_cast<int>(p.output.capacity);
  return min(demand, kLayout == OutputLayout::kExpertMajor ? capacity : max(capacity - start, 0));
}

// Rows of lane's expert before its choice of `slot`, for tokens that may name an expert twice. A whole warp calls.
static __device__ __noinline__ int count_earlier_choices(const LlDispatchParams& p, const RoutingBitmap bitmap,
                                                         int slot, uint32_t expert) {
  int earlier = count_choices(p, bitmap, static_cast<int>(expert), 0, slot);
#pragma unroll 1
  for (int k = 0; k < p.shape.topk; k++) {
    const bool is_same = __shfl_sync(~0u, expert, k) == expert;
    earlier += is_same && k < lane_id() ? 1 : 0;
  }
  return earlier;
}

// The slots whose rows lie before one of `slot`, in the same bin.
template <OutputLayout kLayout>
__device__ __forceinline__ RoutingBitmap::Span slots_before(const LlDispatchParams& p, const RoutingBitmap& bitmap,
                                                            int source, int slot) {
  return bitmap.span(kLayout == OutputLayout::kRankMajor ? source * p.shape.max_tokens : 0, slot);
}

// A choice of a slot, one a lane, and how many rows lie before its own (rank layouts: the token's) in the same bin.
template <OutputLayout kLayout>
struct ChoicePlacement {
  bool wanted;
  uint32_t expert;
  uint32_t bin;
  int index;

  // `before`: slots_before() the slot. A whole warp calls.
  __device__ __forceinline__ static ChoicePlacement of(const LlDispatchParams& p, const RoutingBitmap& bitmap,
                                                       int source, int slot, const RoutingBitmap::Span& before,
                                                       bool has_duplicates, uint32_t expert) {
    ChoicePlacement place;
    place.expert = expert;
    place.wanted = expert < static_cast<uint32_t>(p.output.local_experts);
    if constexpr (has_expert_rows(kLayout)) {
      place.bin = place.wanted ? expert : 0;
      if (has_duplicates) {
        place.index = count_earlier_choices(p, bitmap, slot, expert);
      } else {
        place.index = before.count_bits<4>(bitmap, static_cast<int>(place.bin));
      }
    } else {
      place.bin = source;
      place.index = place.wanted ? before.count_bits<4>(bitmap, 0) : 0;
    }
    return place;
  }

  // kNoRow for lanes without. packed: once starts are known.
  __device__ __forceinline__ int32_t row(const LlDispatchParams& p, const RoutingBitmap& bitmap) const {
    const int start = kLayout == OutputLayout::kPacked ? bitmap.start(static_cast<int>(bin)) : 0;
    const int32_t row = output_row<kLayout>(p, bin, start, index);
    return wanted ? row : kNoRow;
  }
};

// Keeps the ids of two words, and sets their bits.
template <bool kExpertRows, int kBits>
__device__ __forceinline__ void consume_ids(const LlDispatchParams& p, const RoutingBitmap& bitmap, int slot, int index,
                                            uint32_t low, uint32_t high) {
  constexpr int kPerWord = 32 / kBits;
  uint32_t* ids = bitmap.memory + RoutingBitmapShape::kIdsAt + slot * bitmap.shape.id_words + index;
  ids[0] = low;
  ids[1] = high;
  const uint32_t bit = 1u << (slot & 31);
  uint32_t* column = bitmap.bits(0) + (slot >> 5);
  // No branches, and all atomics are on their way before the first is looked at. Choices of other ranks set no bit, in
  // a word of the thread's own.
  uint32_t bits[2 * kPerWord], before[2 * kPerWord];
#pragma unroll
  for (int i = 0; i < 2 * kPerWord; i++) {
    const uint32_t id = (i < kPerWord ? low : high) >> i % kPerWord * kBits & ((1u << kBits) - 1);
    const bool wanted = id < static_cast<uint32_t>(p.output.local_experts);
    bits[i] = wanted ? bit : 0;
    before[i] =
        ptx::atom_or_relaxed_shared(wanted ? column + (kExpertRows ? id * bitmap.shape.words : 0) : ids, bits[i]);
  }
  if (!kExpertRows) return;
  uint32_t seen = 0;
#pragma unroll
  for (int i = 0; i < 2 * kPerWord; i++) seen |= before[i] & bits[i];
  if (seen != 0) bitmap.total(RoutingBitmap::kDuplicates) = 1;
}

// Waits for the routing of slot (source, token) and puts it into the bitmap. One thread calls. kAgain: another block
// has heard the source, so it is not late.
template <bool kExpertRows, bool kAgain>
__device__ __forceinline__ void consume_routing(const LlDispatchParams& p, const LsaPeers& peers, const WarpContext& op,
                                                const RoutingBitmap& bitmap, WaitBudget& budget, int source,
                                                int token) {
  const int slot = source * p.shape.max_tokens + token;
  const auto* header = peers.local<uint64_t>(p.offsets.header(op.bank, source)) + OpHeader::kNumTokens;
  const auto* message = peers.local<ulonglong2>(p.offsets.id_words<kMasksRanks>(op.bank, source, token));
  // The last slot's thread learns the source's number of tokens, so that every rank is heard in every operation.
  const bool needs_header = token == p.shape.max_tokens - 1;
  const uint32_t tag = op.tag;
  const int pairs = bitmap.shape.id_words / 2;
  if (!kMasksRanks) budget = {};
#pragma unroll 1
  for (int pair = 0; pair < pairs; pair++) {
    ulonglong2 words;
    uint64_t count;
    while (true) {
      words = ptx::ld_relaxed_sys(message + pair);
      count = ptx::ld_relaxed_sys(header);
      const bool knows_count = is_tagged(count, tag);
      if (is_tagged(words.x, tag) && is_tagged(words.y, tag) && (knows_count || !needs_header)) break;
      const bool is_absent = knows_count && token >= static_cast<int>(static_cast<uint32_t>(count));
      if (is_absent || (kAgain ? budget.is_due() && op.context.has_failed()
                               : budget.is_spent(op, Awaited::kRouting, source, tag, words.x >> 32))) {
        if (!is_absent && !kAgain) leave_out(op, source);
        words = make_ulonglong2(~0ull, ~0ull);
        break;
      }
    }
    if (needs_header && pair == 0) {
      const bool knows_count = is_tagged(count, tag);
      const int num_tokens = knows_count ? min(static_cast<int>(static_cast<uint32_t>(count)), p.shape.max_tokens) : 0;
      bitmap.tokens(source) = num_tokens;
      atomicMax(&bitmap.total(RoutingBitmap::kMostTokens), num_tokens);
    }
    const auto low = static_cast<uint32_t>(words.x), high = static_cast<uint32_t>(words.y);
    if (p.offsets.ids.bits == 8) {
      consume_ids<kExpertRows, 8>(p, bitmap, slot, 2 * pair, low, high);
    } else {
      consume_ids<kExpertRows, 16>(p, bitmap, slot, 2 * pair, low, high);
    }
  }
}

// A slot of a source that is left out.
static __device__ __noinline__ void consume_nothing(const LlDispatchParams& p, const RoutingBitmap& bitmap, int source,
                                                    int slot) {
  if (slot == (source + 1) * p.shape.max_tokens - 1) bitmap.tokens(source) = 0;
  uint32_t* ids = bitmap.memory + RoutingBitmapShape::kIdsAt + slot * bitmap.shape.id_words;
  for (int i = 0; i < bitmap.shape.id_words; i++) ids[i] = ~0u;
}

// All receiving threads of a block call, after clear() and a barrier, and before another barrier.
template <bool kExpertRows, bool kAgain = false>
__device__ __forceinline__ void build_bitmap(const LlDispatchParams& p, const LsaPeers& peers, const WarpContext& op,
                                             const RoutingBitmap& bitmap, const Divisor& by_max_tokens, int thread,
                                             int num_threads) {
  WaitBudget budget;
#pragma unroll 1
  for (int slot = thread; slot < bitmap.shape.slots; slot += num_threads) {
    const int source = by_max_tokens.divide(slot);
    if (kMasksRanks && has_left_out(op, source)) {
      consume_nothing(p, bitmap, source, slot);
      continue;
    }
    consume_routing<kExpertRows, kAgain>(p, peers, op, bitmap, budget, source, by_max_tokens.remainder(slot, source));
  }
}

// packed: the first row of every expert, none past 2^31 - 1. One warp, for any number of rows.
static __device__ __noinline__ void find_any_starts(const LlDispatchParams& p, const RoutingBitmap bitmap,
                                                    const Divisor by_alignment) {
  constexpr auto kMost = static_cast<uint32_t>(INT32_MAX);
  const int bins = bitmap.shape.bins;
  const int all = exclusive_sums(bins, &bitmap.start(0), [&](int bin) {
    const int demand = demand_of<OutputLayout::kPacked>(p, bitmap, bin);
    const int units = demand > 0 ? by_alignment.divide(demand - 1) + 1 : 0;
    return min(static_cast<uint32_t>(units) * by_alignment.divisor, kMost);
  });
  if (lane_id() == 0) bitmap.start(bins) = all;
}

// packed: the first row of every expert. A warp that finds them for its block has all it needs in registers before the
// routing is known, as all others wait for it then. A lane has two experts of 64.
struct StartFinder {
  bool finds;
  int bins, words;
  Divisor by_alignment;
  ptx::SharedAddress bits, starts;
  unsigned below;  // lanes before this one

  __device__ __forceinline__ StartFinder(const RoutingBitmap& bitmap, const Divisor& alignment, bool finds)
      : finds(finds) {
    if (!finds) return;
    bins = ptx::pinned(bitmap.shape.bins);
    words = ptx::pinned(bitmap.shape.words);
    by_alignment = {ptx::pinned(alignment.divisor), ptx::pinned(alignment.multiplier), ptx::pinned(alignment.shift)};
    bits = bitmap.bits_address;
    starts = ptx::pinned(ptx::shared_address(&bitmap.start(0)));
    below = ptx::opaque((1u << lane_id()) - 1);
  }

  // After a barrier, and before another.
  __device__ __forceinline__ void find(const LlDispatchParams& p, const RoutingBitmap& bitmap) const {
    if (!finds) return;
    int next = 0;
#pragma unroll 1
    for (int bin = 2 * lane_id();; bin += 64) {
      int even = demand_of(min(bin, bins - 1)), odd = demand_of(min(bin + 1, bins - 1));
      if (!bitmap.shape.sums_fit || bitmap.has_duplicates()) return find_any_starts(p, bitmap, by_alignment);
      even = bin < bins ? even : 0;
      odd = bin + 1 < bins ? odd : 0;
      const Spans spans = spans_of(even, odd);
      const int start = next + spans.before;
      if (bin < bins) {
        ptx::st_shared(starts + bin * 4, start);
        ptx::st_shared(starts + bin * 4 + 4, start + spans.even);  // the last one: all rows
      }
      if (bin + 2 == bins) ptx::st_shared(starts + bin * 4 + 8, start + spans.even + spans.odd);
      if (bin - 2 * lane_id() + 64 >= bins) return;
      next += spans.all;
    }
  }

 private:
  // Rows from the starts of a lane's experts to the next ones, of the lanes before, and of all lanes.
  struct Spans {
    int even, odd, before, all;
  };
  __device__ __forceinline__ Spans spans_of(int even, int odd) const {
    const auto alignment = static_cast<int>(by_alignment.divisor);
    Spans spans;
    const unsigned evens = __ballot_sync(~0u, even > 0), odds = __ballot_sync(~0u, odd > 0);
    if (__all_sync(~0u, max(even, odd) <= alignment)) {  // none or one unit each, as mostly: votes do for sums
      spans.even = even > 0 ? alignment : 0;
      spans.odd = odd > 0 ? alignment : 0;
      spans.before = (__popc(evens & below) + __popc(odds & below)) * alignment;
      spans.all = (__popc(evens) + __popc(odds)) * alignment;
    } else {
      spans.even = span_of(even);
      spans.odd = span_of(odd);
      const int end = inclusive_sum(spans.even + spans.odd, [](int a, int b) { return a + b; });
      spans.before = end - spans.even - spans.odd;
      spans.all = __shfl_sync(~0u, end, 31);
    }
    return spans;
  }
  __device__ __forceinline__ int demand_of(int bin) const {
    const ptx::SharedAddress row = bits + bin * words * 4;
    uint32_t word, after;
    ptx::ld_shared(row, word);
    int demand = __popc(word);
#pragma unroll 1
    for (int w = 1; w < words; w += 2) {  // they are odd in number
      ptx::ld_shared(row + w * 4, word);
      ptx::ld_shared(row + w * 4 + 4, after);
      demand += __popc(word) + __popc(after);
    }
    return demand;
  }
  __device__ __forceinline__ int span_of(int demand) const {
    const auto alignment = static_cast<int>(by_alignment.divisor);
    return by_alignment.divide(demand + alignment - 1) * alignment;
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
