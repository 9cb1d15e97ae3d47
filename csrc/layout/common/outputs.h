// How received rows are laid out for the experts, and where each row goes. Places come from counts over
// (source rank, token, k), never from the order of arrival.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/math.h"
#include "layout/common/shape.h"

namespace ep {

enum class OutputLayout : int { kExpertMajor = 0, kPacked = 1, kRankMajor = 2, kFlat = 3 };

// One row for each choice of an expert here (expert layouts), or one for each token with an expert here (rank layouts).
EP_HD constexpr bool has_expert_rows(OutputLayout layout) {
  return layout == OutputLayout::kExpertMajor || layout == OutputLayout::kPacked;
}

// The output has a part for each bin: an expert, or a source rank.
EP_HD constexpr bool has_parts(OutputLayout layout) {
  return layout == OutputLayout::kExpertMajor || layout == OutputLayout::kRankMajor;
}

inline const char* name_of(OutputLayout layout) {
  constexpr const char* kNames[] = {"expert_major", "packed", "rank_major", "flat"};
  return kNames[static_cast<int>(layout)];
}

// A row map entry of a handle: the output row of (source, token, k), or one of these.
constexpr int32_t kNoRow = -1;       // no expert here
constexpr int32_t kDroppedRow = -2;  // an expert here, but the row lies past the capacity

// The info tensor that dispatch fills, int32: counts [bins] | demand [bins] | overflow [1] | total [1] | offsets.
struct OutputShape {
  OutputLayout layout = OutputLayout::kExpertMajor;
  int num_ranks = 1;
  int local_experts = 1;
  int max_tokens = 1;
  int topk = 1;
  int64_t capacity = 1;  // rows an expert (expert_major), rows in all (packed, flat), max_tokens (rank_major)
  int alignment = 1;     // packed: each expert's first row is a multiple of it

  // Refuses sizes beyond 32 bits.
  static OutputShape make(const Shape& shape, OutputLayout layout, int64_t capacity, int64_t alignment) {
    EP_CHECK(capacity >= 0, "capacity is ", capacity, ", must not be negative");
    EP_CHECK(capacity <= INT32_MAX, "the output would have a capacity of ", capacity, " rows, at most ", INT32_MAX);
    EP_CHECK(alignment >= 1 && alignment <= INT32_MAX, "expert_alignment is ", alignment, ", must be 1 to ", INT32_MAX);
    const OutputShape output{layout,     shape.num_ranks, shape.local_experts(),      shape.max_tokens,
                             shape.topk, capacity,        static_cast<int>(alignment)};
    EP_CHECK(output.rows() <= INT32_MAX, "the output would have ", output.rows(), " rows at capacity ", capacity,
             ", at most ", INT32_MAX);
    return output;
  }
  EP_HD constexpr int bins() const { return has_expert_rows(layout) ? local_experts : num_ranks; }
  EP_HD int64_t rows() const {
    if (layout == OutputLayout::kExpertMajor) return local_experts * capacity;
    if (layout == OutputLayout::kRankMajor) return static_cast<int64_t>(num_ranks) * max_tokens;
    return capacity;
  }
  EP_HD constexpr bool has_parts() const { return ep::has_parts(layout); }
  EP_HD int map_k() const { return has_expert_rows(layout) ? topk : 1; }  // row map entries a token
  EP_HD constexpr int demand_at() const { return bins(); }
  EP_HD constexpr int overflow_at() const { return 2 * bins(); }
  EP_HD constexpr int total_at() const { return 2 * bins() + 1; }
  EP_HD constexpr int offsets_at() const { return 2 * bins() + 2; }
  EP_HD int num_offsets() const { return layout == OutputLayout::kPacked ? local_experts + 1 : 0; }
  EP_HD int info_size() const { return offsets_at() + num_offsets(); }

  // The row of the index-th entry of a bin, whose rows start at `start` (packed, flat); kDroppedRow past the capacity.
  EP_HD int32_t row(int bin, int64_t start, int64_t index) const {
    const int64_t limit = has_parts() ? (layout == OutputLayout::kRankMajor ? max_tokens : capacity) : capacity;
    const int64_t place = has_parts() ? index : start + index;
    if (place >= limit) return kDroppedRow;
    return static_cast<int32_t>(has_parts() ? bin * limit + index : place);
  }
  // Rows of a bin of `demand` rows that lie in the tensor.
  EP_HD int64_t kept(int64_t start, int64_t demand) const {
    int64_t room = has_parts() ? (layout == OutputLayout::kRankMajor ? max_tokens : capacity) : capacity - start;
    room = room < 0 ? 0 : room;
    return demand < room ? demand : room;
  }
  // Rows from the start of a bin to the start of the next.
  EP_HD int64_t span(int64_t demand) const {
    return layout == OutputLayout::kPacked ? align_up<int64_t>(demand, alignment) : demand;
  }
};

// A handle, one int32 tensor: tokens of every source [R], and the tag of the dispatch that made the handle [1], the
// same on all ranks | expert ids of the own tokens [T, K] | row map [R, M, map_k] | weights of local choices [R, M,
// map_k] as bits of fp32.
struct HandleShape {
  int num_ranks = 1;
  int num_tokens = 0;
  int max_tokens = 1;
  int topk = 1;
  int map_k = 1;

  static HandleShape of(const OutputShape& output, int num_tokens) {
    return {output.num_ranks, num_tokens, output.max_tokens, output.topk, output.map_k()};
  }
  EP_HD int64_t ids_at() const { return align_up(num_ranks + 1, 4); }
  EP_HD int64_t map_at() const { return ids_at() + align_up<int64_t>(static_cast<int64_t>(num_tokens) * topk, 4); }
  EP_HD int64_t map_size() const { return static_cast<int64_t>(num_ranks) * max_tokens * map_k; }
  EP_HD int64_t weights_at() const { return map_at() + align_up<int64_t>(map_size(), 4); }
  EP_HD int64_t size() const { return weights_at() + align_up<int64_t>(map_size(), 4); }
  // For a number of tokens that may not be known yet.
  template <class Int>
  Int size_for(Int tokens) const {
    HandleShape none = *this;
    none.num_tokens = 0;
    return (tokens * topk + 3) / 4 * 4 + none.size();
  }
};

// DeepEP's handle in one allocation, int32: src_info [L, C] | a handle | so much that the size tells the number of
// tokens, which nobody writes down.
struct SourceShape {
  int64_t rows = 0;  // L * C

  static SourceShape of(const OutputShape& output) { return {output.rows()}; }
  int64_t handle_at() const { return align_up<int64_t>(rows, 4); }
  int64_t size(const HandleShape& handle) const { return size_for<int64_t>(handle, handle.num_tokens); }
  // For a number of tokens that may not be known yet.
  template <class Int>
  Int size_for(const HandleShape& handle, Int tokens) const {
    const Int ids = tokens * handle.topk, padding = (ids + 3) / 4 * 4 - ids;
    return handle.size_for(tokens) + handle_at() + padding;
  }
};

}  // namespace ep
