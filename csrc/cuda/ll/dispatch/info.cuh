// What a dispatch writes apart from rows: the info tensor, and entries of rows that do not exist.
#pragma once

#include "cuda/device/arrivals.cuh"
#include "cuda/ll/dispatch/routing_bitmap.cuh"
#include "cuda/protocol/ids.cuh"
#include "layout/common/small_blocks.h"

namespace ep {
inline namespace EP_KERNELS {

static __device__ __noinline__ void zero_swizzled_scales(const LlDispatchParams& p, int64_t from, int64_t to) {
  const bool has_bins = p.output.has_parts();
  const int64_t bin_rows = has_bins ? p.output.rows() / p.output.bins() : p.output.rows();
  const int words = ceil_div(p.out_scales.count, kScaleTileScales);
  const int64_t bin_bytes = ceil_div<int64_t>(bin_rows, kScaleTileRows) * words * kScaleTileBytes;
  for (int64_t i = from * words + lane_id(); i < to * words; i += 32) {
    const int64_t row = i / words, bin = row / bin_rows;
    char* out = static_cast<char*>(p.out_scales.data) + bin * bin_bytes;
    *reinterpret_cast<uint32_t*>(out + swizzled_word(row - bin * bin_rows, static_cast<int>(i % words), words)) = 0;
  }
}

// A warp fills rows [from, to) with zeros, if the caller asks for it.
static __device__ __noinline__ void zero_rows(const LlDispatchParams& p, int64_t from, int64_t to) {
  const int vectors = p.row.payload_bytes / kLaneBytes;
  auto* out = static_cast<uint4*>(p.out_x);
  for (int64_t i = from * vectors + lane_id(); i < to * vectors; i += 32) ptx::st(out + i, make_uint4(0, 0, 0, 0));
  const Scales& scales = p.out_scales;
  if (scales.data == nullptr) return;
  if (is_swizzled(p.options.quant)) return zero_swizzled_scales(p, from, to);
  const int bytes = scales.element_bytes;
  const bool are_words = bytes == 4 && reinterpret_cast<uintptr_t>(scales.data) % 4 == 0;
  for (int64_t row = from; row < to; row++) {
    for (int group = lane_id(); group < scales.count; group += 32) {
      char* at = static_cast<char*>(scales.data) + (row * scales.row_stride + group * scales.group_stride) * bytes;
      if (are_words) {
        *reinterpret_cast<uint32_t*>(at) = 0;
      } else {
        for (int b = 0; b < bytes; b++) at[b] = 0;
      }
    }
  }
}

// Rows [first, end) that do not exist: of a bin in its own part of the output, or behind its last row.
struct Gap {
  int64_t first, end;
};

template <OutputLayout kLayout>
__device__ __forceinline__ Gap gap_of(const LlDispatchParams& p, const RoutingBitmap& bitmap, int bin) {
  const OutputShape& output = p.output;
  const int demand = demand_of<kLayout>(p, bitmap, bin);
  if constexpr (kLayout == OutputLayout::kPacked) {
    const int64_t start = min(static_cast<int64_t>(bitmap.start(bin)), output.capacity);
    const int64_t next = min(static_cast<int64_t>(bitmap.start(bin + 1)), output.capacity);
    return {start + kept_rows<kLayout>(p, static_cast<int>(start), demand), next};
  }
  const int64_t limit = kLayout == OutputLayout::kExpertMajor ? output.capacity : p.shape.max_tokens;
  return {bin * limit + kept_rows<kLayout>(p, 0, demand), (bin + 1) * limit};
}

// Behind the last row of all, where bins have no parts of their own.
template <OutputLayout kLayout>
__device__ __forceinline__ Gap last_gap(const LlDispatchParams& p, const RoutingBitmap& bitmap) {
  const OutputShape& output = p.output;
  const int64_t end =
      kLayout == OutputLayout::kPacked ? bitmap.start(output.bins()) : bitmap.count_bits(0, 0, bitmap.shape.slots);
  return {min(end, output.capacity), output.capacity};
}

template <bool kExpertRows>
__device__ __forceinline__ void clear_rows(const LlDispatchParams& p, int64_t from, int64_t to) {
#pragma unroll 1
  for (int64_t row = from + lane_id(); row < to; row += 32) clear_entry(p, kExpertRows, row);
  if (p.options.zero_padding) zero_rows(p, from, to);
}

// Warp `index` of `warps` clears the gaps of bins index, index + warps, ..., and of the last gap as many times 32 rows.
template <OutputLayout kLayout>
__device__ __forceinline__ void clear_gaps(const LlDispatchParams& p, const RoutingBitmap& bitmap, int index,
                                           int warps) {
  constexpr bool kExpertRows = has_expert_rows(kLayout);
  if constexpr (kLayout != OutputLayout::kFlat) {
#pragma unroll 1
    for (int bin = index; bin < p.output.bins(); bin += warps) {
      const Gap gap = gap_of<kLayout>(p, bitmap, bin);
      clear_rows<kExpertRows>(p, gap.first, gap.end);
    }
  }
  if constexpr (!has_parts(kLayout)) {
    const Gap gap = last_gap<kLayout>(p, bitmap);
#pragma unroll 1
    for (int64_t row = gap.first + index * 32; row < gap.end; row += warps * 32) {
      clear_rows<kExpertRows>(p, row, min(row + 32, gap.end));
    }
  }
}

// Which rows of an expert came from which rank.
static __device__ __noinline__ void store_ranges(const LlDispatchParams& p, const RoutingBitmap bitmap, int bin,
                                                 bool has_failed) {
  const int max_tokens = p.shape.max_tokens, capacity = static_cast<int>(p.output.capacity);
  int64_t* ranges = p.layout_range + static_cast<int64_t>(bin) * p.shape.num_ranks;
  int begin = 0;
  for (int source = 0; source < p.shape.num_ranks; source++) {
    const int demand = has_failed ? 0
                                  : count_rows(p, bitmap, bitmap.has_duplicates(), bin, source * max_tokens,
                                               (source + 1) * max_tokens);
    const int end = min(begin + demand, capacity);
    ranges[source] = static_cast<int64_t>(begin) << 32 | (end - begin);
    begin = end;
  }
}

// What of the info tensor and the handle needs no sums: by another warp, as the sums are what is done last.
template <OutputLayout kLayout>
__device__ __forceinline__ void store_rest_of_info(const LlDispatchParams& p, const RoutingBitmap& bitmap,
                                                   uint32_t tag) {
  const OutputShape& output = p.output;
  if constexpr (kLayout == OutputLayout::kPacked) {
#pragma unroll 1
    for (int i = lane_id(); i < output.num_offsets(); i += 32) {
      p.info[output.offsets_at() + i] = min(bitmap.start(i), static_cast<int>(output.capacity));
    }
  }
#pragma unroll 1
  for (int r = lane_id(); r < p.shape.num_ranks; r += 32) p.handle.tokens[r] = bitmap.tokens(r);
  if (lane_id() == 0) *p.handle.dispatch = static_cast<int32_t>(tag);
}

// Warp `index` of the `warps` that write the info tensor, all of one block: each takes 32 bins at a time, and if there
// are several, the last to finish writes the sums. `units`: of a row, for arrivals.
template <OutputLayout kLayout>
__device__ __forceinline__ void store_info(const LlDispatchParams& p, const OpContext& op, const RoutingBitmap& bitmap,
                                           int index, int warps, int units) {
  const OutputShape& output = p.output;
  const int lane = lane_id(), first = index * 32 + lane;
  const uint32_t failure = ptx::ld_relaxed_gpu(&op.state->failure_flag.has_failed);  // then nothing counts
  int dropped = 0, total = 0, blocks = 0;
#pragma unroll 1
  for (int bin = first; bin < output.bins(); bin += warps * 32) {
    int demand = demand_of<kLayout>(p, bitmap, bin);
    int start = 0;
    if constexpr (kLayout == OutputLayout::kPacked) start = bitmap.start(bin);
    if constexpr (kLayout == OutputLayout::kFlat) start = bitmap.count_bits(0, 0, bin * p.shape.max_tokens);
    const bool has_failed = ptx::opaque(failure) != 0;  // no earlier: until here no instruction waits for it
    if (has_failed) demand = 0;
    const int kept = kept_rows<kLayout>(p, start, demand);
    p.info[bin] = kept;
    p.info[output.demand_at() + bin] = demand;
    dropped += demand - kept;
    total += kept;
    if (kAnnouncesRows && has_expert_rows(kLayout) && p.arrivals.state != nullptr) {
      const int64_t next = kLayout == OutputLayout::kPacked ? bitmap.start(bin + 1) : 0;
      if (has_failed) {  // blocks without rows would end a consumer as if all had come
        tell_failure(p.arrivals);
      } else {
        blocks += plan_expert(p.arrivals, output, bin, start, next, kept, units);
        if (bin + 1 == output.bins()) plan_rest(p.arrivals, output, next);
      }
    }
    if (p.recv_stats != nullptr) p.recv_stats[bin] += kept;
    if (has_expert_rows(kLayout) && p.layout_range != nullptr) store_ranges(p, bitmap, bin, has_failed);
  }
  if constexpr (kAnnouncesRows) {
    if (p.arrivals.state != nullptr) __threadfence();
    __syncwarp();  // plan_expert() leaves the lanes diverged
    blocks = __reduce_add_sync(~0u, blocks);
  }
  dropped = __reduce_add_sync(~0u, dropped);
  total = __reduce_add_sync(~0u, total);
  if (lane != 0) return;
  if (warps > 1) {
    atomicAdd(&bitmap.total(RoutingBitmap::kDropped), dropped);
    atomicAdd(&bitmap.total(RoutingBitmap::kKept), total);
    if constexpr (kAnnouncesRows) atomicAdd(&bitmap.total(RoutingBitmap::kBlocks), blocks);
    __threadfence_block();
    if (atomicAdd(&bitmap.total(RoutingBitmap::kInfoWarps), 1) != warps - 1) return;
    __threadfence_block();
    dropped = atomicAdd(&bitmap.total(RoutingBitmap::kDropped), 0);
    total = atomicAdd(&bitmap.total(RoutingBitmap::kKept), 0);
    if constexpr (kAnnouncesRows) blocks = atomicAdd(&bitmap.total(RoutingBitmap::kBlocks), 0);
  }
  // A warp that has seen a failure has planned nothing, and this one sees it, too.
  if (kAnnouncesRows && has_expert_rows(kLayout) && p.arrivals.state != nullptr &&
      ptx::ld_relaxed_gpu(&op.state->failure_flag.has_failed) == 0) {
    announce_plan(p.arrivals, blocks);
  }
  p.info[output.overflow_at()] = dropped;
  p.info[output.total_at()] = total;
  if (dropped == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&op.state->diagnostics.dropped_rows),
            static_cast<unsigned long long>(dropped));
}

}  // namespace EP_KERNELS
}  // namespace ep
