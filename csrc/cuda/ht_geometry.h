// Sizes of high throughput's kernels that follow from params and plan.
#pragma once

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "cuda/device_state.h"
#include "runtime/ht_params.h"
#include "runtime/ht_plan.h"

namespace ep {

constexpr int kHtSharedBytes = 200 * 1024;

inline void check_ht_ranks(const Topology& topology) {
  EP_CHECK(topology.num_domains() == 1, topology.num_domains(), " domains: high throughput on CUDA serves one");
  EP_CHECK(topology.num_ranks <= kMaxCudaRanks, topology.num_ranks, " ranks, high throughput on CUDA serves ",
           kMaxCudaRanks);
}

// The first kernel of a dispatch that routes: counts, their exchange, places.
struct HtRouteParams : HtDispatchParams {};

// Shared memory: tables | counters of placing warps | ids and numbers of the block's share, if they fit. While tokens
// are counted the last two are counters of choices, then ranks of a tile's choices.
struct HtRouteGeometry {
  int chunk_tokens = 32;      // of a block, a multiple of 32
  int place_warps = 1;        // that place a chunk's tokens, each with counters of its own
  int warp_tokens = 1;        // of each
  int step_tokens = 1;        // that a warp looks at together
  bool has_wide_ids = false;  // 16 bytes of ids may be loaded at once
  bool keeps_share = false;   // in shared memory; else where the handle will have it
  int copies_log = 0;         // of the counters of an expert's choices: lanes that share one wait for one another
  int tile_tokens = 32;       // a multiple of 32
  Divisor by_local_experts, by_topk;
  int work_at = 0, tile_at = 0, share_at = 0, bytes = 0;  // of shared memory

  static constexpr int kTileLimit = 64 * 1024;
  static constexpr int kShareInts = 3;  // of a choice: id, its number for the expert, its token's for the rank

  static HtRouteGeometry of(const HtRouteParams& p, const HtPlan& plan) {
    HtRouteGeometry g;
    const int ranks = p.shape.num_ranks, experts = p.shape.num_experts, topk = p.shape.topk;
    g.chunk_tokens = align_up(ceil_div(std::max(p.num_tokens, 1), plan.blocks), 32);
    const int counters = 4 * (ranks + experts);  // of a placing warp, bytes
    const int others = 4 * (9 * ranks + 4 * experts + 64);
    EP_CHECK(others + counters <= kHtSharedBytes, experts, " experts and ", ranks, " ranks need ", others + counters,
             " bytes of shared memory, high throughput on CUDA has ", kHtSharedBytes);
    const int room = kHtSharedBytes - others;
    g.place_warps = std::min(plan.warps, room / counters);
    g.warp_tokens = ceil_div(g.chunk_tokens, g.place_warps);
    g.step_tokens = 32 / topk;
    g.by_local_experts = Divisor::of(p.shape.local_experts());
    g.by_topk = Divisor::of(topk);

    const auto address = reinterpret_cast<uintptr_t>(p.topk_idx);
    const int64_t choices = static_cast<int64_t>(p.num_tokens) * topk;
    g.has_wide_ids = address % 16 == 0 && choices % (p.is_idx64 ? 2 : 4) == 0;
    const auto copies_bytes = [&] { return g.copies_log == 0 ? 0 : align_up(4 * (experts + 1) << g.copies_log, 16); };
    g.copies_log = 5;
    while (g.copies_log > 0 && copies_bytes() > room / 2) g.copies_log--;
    const int tile_limit = std::min(room - copies_bytes(), kTileLimit) / topk / 32 * 32;
    g.tile_tokens = std::min(align_up(std::max(p.num_tokens, 1), 32), tile_limit);
    const int64_t share = static_cast<int64_t>(4 * kShareInts) * g.chunk_tokens * topk;
    g.keeps_share = g.place_warps * counters + share <= room;

    g.work_at = others / 16 * 16;
    g.tile_at = g.work_at + copies_bytes();
    g.share_at = g.work_at + g.place_warps * counters;
    g.bytes = std::max(g.tile_at + g.tile_tokens * topk, g.share_at + (g.keeps_share ? static_cast<int>(share) : 0));
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
  Divisor by_tokens, by_local_experts, by_topk;
  int stages = 0;                // a warp's own, of warps [0, stages)
  int tables_at = 0, bytes = 0;  // shared memory: stages | barriers and tables

  static constexpr int kStageLimit = kHtSharedBytes / 2;
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

  static HtSendGeometry shapes_of(const HtDispatchParams& p) {
    HtSendGeometry g;
    g.passes = 0;
    int filled = 0;
    for (int i = 0; i < p.num_parts; i++) {
      const HtPart& part = p.parts[i];
      const int bytes = align_up(part.bytes, 128);
      const bool stays = i > 0 && (part.in == nullptr || filled + bytes <= kStageLimit);
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

  static HtSendGeometry of(const HtDispatchParams& p, const HtPlan& plan) {
    HtSendGeometry g = shapes_of(p);
    g.units = p.num_tokens * g.passes;
    g.by_tokens = Divisor::of(std::max(p.num_tokens, 1));
    g.by_local_experts = Divisor::of(p.shape.local_experts());
    g.by_topk = Divisor::of(p.shape.topk);
    // Those that copy need one too, and do without where there is no room.
    const int most = g.has_copies(p.output.layout) ? plan.warps : plan.workers;
    g.stages = std::max(plan.workers, std::min(most, kHtSharedBytes / g.stage_bytes));
    g.tables_at = g.stages * g.stage_bytes;
    const int ranks = p.shape.num_ranks;
    g.bytes = g.tables_at + 8 * kBarriers + ranks * (8 * kHtMaxParts + 7 * 4) + 4 * (p.output.local_experts + 1) + 64;
    return g;
  }
};

// Shared memory: rings of the warps, through which rows come | tables.
struct HtCombineGeometry {
  int pieces = 1;     // of a row: what a warp adds up at once
  int row_lanes = 0;  // lanes' worths of a row
  bool has_staging = false;
  Divisor by_local_experts;
  int tables_at = 0, bytes = 0;  // of shared memory

  static constexpr int kPieceSteps = 4, kStepBytes = 32 * 16;
  static constexpr int kRingItems = 4;  // pieces of rows that are under way
  static constexpr int kRingBytes = kRingItems * kPieceSteps * kStepBytes;
  static constexpr int kMaxWarps = 24;

  static bool stages(const HtCombineParams& p) { return p.has_values || (p.has_rows() && !p.reads_in_place()); }

  static HtCombineGeometry of(const HtCombineParams& p, const HtPlan& plan) {
    HtCombineGeometry g;
    const bool is_wide = p.dtype == DType::kF32 || p.wire_dtype == DType::kF32 || p.out_dtype == DType::kF32;
    g.row_lanes = p.hidden / (is_wide ? 4 : 8);
    g.pieces = std::max(1, ceil_div(g.row_lanes, 32 * kPieceSteps));
    g.has_staging = stages(p);
    g.by_local_experts = Divisor::of(p.shape.local_experts());
    const int ranks = p.shape.num_ranks;
    g.tables_at = plan.warps * kRingBytes;
    g.bytes = g.tables_at + ranks * (8 + 4 * 4) + 4 * (2 * plan.chunks * ranks + 1) + 64;
    return g;
  }
};

}  // namespace ep
