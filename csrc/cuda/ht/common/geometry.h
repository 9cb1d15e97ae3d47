// Sizes of high throughput's kernels that follow from params and plan.
#pragma once

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/math.h"
#include "cuda/protocol/kernel_args.h"
#include "runtime/ht/params.h"
#include "runtime/ht/plan.h"

namespace ep {

inline int rank_bits_of(const Shape& shape) { return std::bit_width(static_cast<unsigned>(shape.num_ranks - 1)); }

// The first kernel of a dispatch that routes: counts, their exchange, places.
struct HtRouteParams : HtDispatchParams {
  uint64_t* block_counts = nullptr;  // [kHtRouteBlocks][E + R + 2] tagged words: what each block has counted
};

struct HtRouteGeometry {
  int chunk_tokens = 32;               // of a block's share
  int shares = 1;                      // that are not empty: of the first blocks
  int place_warps = 1;                 // that number and place a share's tokens, each with counters of its own
  int warp_tokens = 1;                 // of each, a multiple of step_tokens
  int step_tokens = 1;                 // that a warp looks at together
  int counts = 4;                      // of a share, or of a warp's tokens: see RouteTables
  int rank_bits = 1, expert_bits = 1;  // of a rank or none, of an expert or none
  Divisor by_local_experts, by_topk, by_counts, by_rank_counts;
  int bytes = 0;  // of shared memory

  // The first warp of a block places nothing.
  static HtRouteGeometry of(const HtRouteParams& p, const HtPlan& plan) {
    HtRouteGeometry g;
    const int ranks = p.shape.num_ranks, experts = p.shape.num_experts, topk = p.shape.topk;
    EP_CHECK(static_cast<int64_t>(p.num_tokens) * topk <= INT32_MAX / 2, p.num_tokens, " tokens of ", topk,
             " choices: high throughput on CUDA counts choices in 32 bits");
    g.counts = experts + ranks + 2;
    const int counters = 4 * g.counts;  // of a placing warp, bytes
    const int others = 2 * counters + 4 * (3 * ranks + 2 * experts + 4);
    EP_CHECK(others + counters <= plan.shared_bytes, experts, " experts and ", ranks, " ranks need ", others + counters,
             " bytes of shared memory, high throughput has ", plan.shared_bytes, " on this GPU");
    g.place_warps = std::min(plan.warps - 1, (plan.shared_bytes - others) / counters);
    g.step_tokens = 32 / topk;
    g.chunk_tokens = align_up(ceil_div(std::max(p.num_tokens, 1), plan.blocks), 32);
    g.shares = ceil_div(p.num_tokens, g.chunk_tokens);
    g.warp_tokens = align_up(ceil_div(g.chunk_tokens, g.place_warps), g.step_tokens);
    g.rank_bits = std::bit_width(static_cast<unsigned>(ranks));
    g.expert_bits = std::bit_width(static_cast<unsigned>(experts));
    g.by_local_experts = Divisor::of(p.shape.local_experts());
    g.by_topk = Divisor::of(topk);
    g.by_counts = Divisor::of(g.counts);
    g.by_rank_counts = Divisor::of(ranks + 1);
    g.bytes = others + g.place_warps * counters;
    return g;
  }
};

// A worker moves one token's parts through its stage of shared memory; a pass takes as many parts as fit.
struct HtSendGeometry {
  int stage_bytes = 0;
  int passes = 1;
  int first_part[kHtMaxParts + 1] = {};  // of each pass
  int stage_offset[kHtMaxParts] = {};
  int in_width[kHtMaxParts] = {};  // bytes that are loaded at once; 0: by a bulk copy
  int units = 0;                   // of all workers
  bool has_staged = false;         // a part's output lies elsewhere than in the arena
  int rank_bits = 0;               // of a rank
  Divisor by_tokens, by_local_experts, by_topk, by_near_ranks, by_words;  // words: of a slot
  int tables_at = 0, bytes = 0;  // shared memory: stages of workers | barriers and tables

  static constexpr int kBarriers = 32;  // warps of the largest block

  static int in_width_of(const HtPart& part) {
    if (part.in == nullptr) return 0;
    const auto address = reinterpret_cast<uintptr_t>(part.in);
    const uint64_t unit = part.elements == 1 ? part.bytes : part.element_bytes;
    const uint64_t bits = unit | address | static_cast<uint64_t>(part.row_stride) |
                          (part.elements == 1 ? 0 : static_cast<uint64_t>(part.element_stride));
    if (part.elements == 1 && bits % 16 == 0) return 0;
    return static_cast<int>(std::min<uint64_t>(bits & ~(bits - 1), 8));
  }

  // `shared_bytes`: HtPlan::shared_bytes. Two workers have a pass of many parts in it.
  static HtSendGeometry shapes_of(const HtDispatchParams& p, int shared_bytes) {
    HtSendGeometry g;
    g.passes = 0;
    int filled = 0;
    for (int i = 0; i < p.num_parts; i++) {
      const HtPart& part = p.parts[i];
      const int bytes = align_up(part.bytes, 128);
      const bool stays = i > 0 && (part.in == nullptr || filled + bytes <= shared_bytes / 2);
      if (!stays) {
        g.first_part[g.passes++] = i;
        filled = 0;
      }
      g.stage_offset[i] = filled;
      filled += bytes;
      g.stage_bytes = std::max(g.stage_bytes, filled);
      g.in_width[i] = in_width_of(part);
      g.has_staged = g.has_staged || part.out_offset == kNoOffset;
    }
    g.first_part[g.passes] = p.num_parts;
    return g;
  }

  // The receiver has rows to copy.
  EP_HD bool has_copies(OutputLayout layout) const { return has_staged || has_expert_rows(layout); }

  // `shapes`: shapes_of().
  static HtSendGeometry of(const HtDispatchParams& p, const HtPlan& plan, const HtSendGeometry& shapes) {
    HtSendGeometry g = shapes;
    g.units = p.num_tokens * g.passes;
    g.rank_bits = rank_bits_of(p.shape);
    g.by_tokens = Divisor::of(std::max(p.num_tokens, 1));
    g.by_local_experts = Divisor::of(p.shape.local_experts());
    g.by_topk = Divisor::of(p.shape.topk);
    g.by_near_ranks = Divisor::of(p.offsets.topology.domain_size);
    g.by_words = Divisor::of(p.offsets.slot.words());
    g.tables_at = plan.workers * g.stage_bytes;
    const int ranks = p.shape.num_ranks;
    g.bytes = g.tables_at + 8 * kBarriers + ranks * (8 * kHtMaxParts + 8 * 4) + 4 * (p.output.local_experts + 1) +
              4 * (plan.chunks * ranks + 1) + 64;
    return g;
  }
};

// Shared memory: rings of the warps, through which rows come | tables.
struct HtCombineGeometry {
  int pieces = 1;       // of a row: what a warp adds up at once
  int unit_pieces = 1;  // that a warp takes of a token at a time
  int units = 0;
  Divisor by_parts;   // units of a token
  int row_lanes = 0;  // lanes' worths of a row
  bool has_staging = false;
  int chunks = 1;     // in which ranks announce rows that they stage
  int rank_bits = 0;  // of a rank
  Divisor by_local_experts;
  int tables_at = 0, bytes = 0;  // of shared memory

  static constexpr int kPieceSteps = 4, kStepBytes = 32 * 16;
  static constexpr int kRingItems = 4;  // pieces of rows that are under way
  static constexpr int kRingBytes = kRingItems * kPieceSteps * kStepBytes;
  static constexpr int kMaxWarps = 24;

  static bool stages(const HtCombineParams& p) { return p.has_values || (p.has_rows() && !p.reads_in_place()); }

  static HtCombineGeometry of(const HtCombineParams& p, const HtPlan& plan) {
    HtCombineGeometry g;
    const bool is_wide =
        p.dtype == DType::kF32 || p.options.wire_dtype == DType::kF32 || p.options.out_dtype == DType::kF32;
    g.row_lanes = p.hidden / (is_wide ? 4 : 8);
    g.pieces = std::max(1, ceil_div(g.row_lanes, 32 * kPieceSteps));
    g.unit_pieces = std::min(g.pieces, plan.unit_pieces > 0 ? plan.unit_pieces : g.pieces);
    const int parts = ceil_div(g.pieces, g.unit_pieces);
    g.units = p.num_tokens * parts;
    g.by_parts = Divisor::of(parts);
    g.has_staging = stages(p);
    g.rank_bits = rank_bits_of(p.shape);
    g.by_local_experts = Divisor::of(p.shape.local_experts());
    const int ranks = p.shape.num_ranks;
    g.tables_at = plan.warps * kRingBytes;
    g.chunks = ht_chunks(ranks);
    g.bytes = g.tables_at + ranks * (8 + 4 * 4) + 4 * (2 * plan.chunks * ranks + 1 + g.chunks * ranks) + 64;
    return g;
  }
};

template <>
struct GeometryOf<HtRouteParams> {
  using Type = HtRouteGeometry;
};
template <>
struct GeometryOf<HtDispatchParams> {
  using Type = HtSendGeometry;
};
template <>
struct GeometryOf<HtCombineParams> {
  using Type = HtCombineGeometry;
};

}  // namespace ep
