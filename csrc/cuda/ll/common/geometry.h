// What a kernel would otherwise work out in every warp, from params and plan, before its first byte leaves: sizes of
// pieces, strides of work, divisors. Pure functions, so that they are tested anywhere.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>

#include "base/check.h"
#include "base/math.h"
#include "cuda/protocol/kernel_args.h"
#include "runtime/ll/params.h"
#include "runtime/ll/plan.h"

namespace ep {

// Sizes of a row in the units of a warp.
struct RowShape {
  int vectors = 0;          // of 16 bytes on the wire, side words apart
  int payload_vectors = 0;  // of them, the payload's
  int steps = 0;
  int sides = 0;  // side words: one for each step, of NVFP4 as many as there are scales for
  int side_offset = 0;
  int side_bytes = 0;  // of each: 0, 4 or 16

  static RowShape of(const LlDispatchParams& p) {
    RowShape row;
    row.payload_vectors = p.row.payload_bytes / kLaneBytes;
    row.vectors = p.row.is_keyed ? p.row.body_bytes() / kLaneBytes : row.payload_vectors;
    row.steps = ceil_div(row.vectors, 32);
    row.sides = is_nvfp4(p.options.quant) ? ceil_div(p.row.scale_bytes, kLaneBytes) : row.steps;
    row.side_offset = p.row.is_keyed ? p.row.keys_offset() : p.row.scales_offset();
    if (p.row.is_keyed || p.options.quant == Quant::kFp8Ue8m0) {
      row.side_bytes = 4;
    } else if (p.options.quant != Quant::kNone) {
      row.side_bytes = 16;
    }
    return row;
  }
};

// Scales move in vectors of 16 bytes, a lane each, or a vector in words or in bytes: in the largest unit that addresses
// and sizes are multiples of. `all`: their bits, or-ed.
inline int scale_unit(int64_t all) {
  if (all % kLaneBytes == 0) return kLaneBytes;
  return all % 4 == 0 ? 4 : 1;
}

// Where the vectors of a row's scales come from. All lengths are in bytes.
struct ScaleSource {
  const char* data = nullptr;
  int64_t row_stride = 0;
  int64_t vector_stride = 0;
  int64_t word_at[4] = {};     // words of a vector, from its first on
  int64_t element_stride = 0;  // bytes of a vector: byte i is in element i >> shift
  int shift = 0;
  int unit = kLaneBytes;
  int row_bytes = 0;  // that move

  static ScaleSource of(const Scales& scales) {
    const int64_t size = scales.element_bytes, row_stride = scales.row_stride * size;
    const auto address = reinterpret_cast<intptr_t>(scales.data);
    // A row that lies together is one of bytes, whatever its elements.
    const bool is_contiguous = scales.group_stride == 1 || scales.count <= 1;
    ScaleSource source;
    source.data = static_cast<const char*>(scales.data);
    source.row_stride = row_stride;
    source.row_bytes = scales.count * scales.element_bytes;
    source.element_stride = is_contiguous ? 1 : scales.group_stride * size;
    source.shift = is_contiguous ? 0 : std::countr_zero(static_cast<unsigned>(size));
    source.unit = scale_unit(address | (is_contiguous ? row_stride | source.row_bytes : size));
    for (int i = 0; i < 4; i++) source.word_at[i] = byte_at(4 * i, source.element_stride, source.shift);
    source.vector_stride = byte_at(kLaneBytes, source.element_stride, source.shift);
    return source;
  }
  EP_HD static int64_t byte_at(int byte, int64_t element_stride, int shift) {
    return (byte >> shift) * element_stride + (byte & ((1 << shift) - 1));
  }
};

// Where they go.
struct ScaleTarget {
  char* data = nullptr;
  int unit = kLaneBytes;
  int row_bytes = 0;

  static ScaleTarget of(const Scales& scales) {
    const int64_t size = scales.element_bytes;
    ScaleTarget target;
    target.data = static_cast<char*>(scales.data);
    target.row_bytes = static_cast<int>(scales.count * size);
    const int64_t rows = (scales.row_stride | scales.bin_stride) * size | target.row_bytes;
    target.unit = scale_unit(reinterpret_cast<intptr_t>(scales.data) | (scales.group_stride == 1 ? rows : size));
    return target;
  }
};

// What a receiving block keeps in shared memory (routing_bitmap.cuh); offsets are in words of 32 bits.
struct RoutingBitmapShape {
  static constexpr int kIdsAt = 8;  // words, behind the totals

  int slots = 0;     // (source, token) pairs: source * max_tokens + token
  int bins = 1;      // local experts, or one bin of all rows in rank layouts
  int words = 1;     // of a bin. Odd, so that threads that look at one word of many bins use different banks
  int id_words = 2;  // of a slot
  int bits_at = 0, tokens_at = 0, starts_at = 0;
  bool sums_fit = true;  // packed: no start is more than an int holds
  int64_t bytes = 0;

  static RoutingBitmapShape of(const LlDispatchParams& p) {
    RoutingBitmapShape shape;
    const int64_t slots = static_cast<int64_t>(p.shape.num_ranks) * p.shape.max_tokens;
    shape.bins = has_expert_rows(p.output.layout) ? p.output.local_experts : 1;
    shape.id_words = p.offsets.ids.words();
    const int64_t words = ceil_div<int64_t>(slots, 32) | 1;
    const int64_t bits_at = kIdsAt + slots * shape.id_words;
    const int64_t tokens_at = bits_at + align_up<int64_t>(shape.bins * words, 4);
    const int64_t starts_at = tokens_at + p.shape.num_ranks;
    shape.bytes = 4 * align_up<int64_t>(starts_at + shape.bins + 1, 4);
    shape.slots = static_cast<int>(slots);
    shape.words = static_cast<int>(words);
    shape.bits_at = static_cast<int>(bits_at);
    shape.tokens_at = static_cast<int>(tokens_at);
    shape.starts_at = static_cast<int>(starts_at);
    shape.sums_fit = slots * p.shape.topk + static_cast<int64_t>(shape.bins) * p.output.alignment <= INT32_MAX;
    return shape;
  }
};

struct LlDispatchGeometry {
  RowShape row;
  int send_units = 0;     // pieces of own rows
  int own_units = 0;      // pieces of own rows to place; a receive part knows only the limit of its tokens
  int receive_units = 0;  // pieces of all rows there may be to place
  int numbers_piece = 0;  // the piece whose warp stores the row's numbers; past the row, if there are warps to spare
  int gap_warps = 0;      // that clear_gaps() has something to do for
  int listeners = 0;      // warps of a receiving block that wait for routing, if not all do: they come last for rows
  // Blocks of a plan in which all send and receive, else 0; of the own rank's pieces, how many each has, and how many
  // blocks have one more.
  int shared_blocks = 0, own_turns = 0, own_rest = 0;
  // Shared blocks wait for the routing. The warps that receive, of whichever block is resident, draw a ticket for each
  // token, and one in vain. At this one the counter wraps to zero.
  uint32_t last_routing_ticket = 0;
  Divisor by_pieces;  // of a row, to send
  Divisor by_receive_pieces;
  Divisor by_others;  // ranks but this one
  Divisor by_max_tokens;
  Divisor by_id_words;
  Divisor by_local_experts;
  Divisor by_alignment;
  RoutingBitmapShape bitmap;
  ScaleSource given_scales;  // of keyed rows
  ScaleTarget out_scales;

  static LlDispatchGeometry of(const LlDispatchParams& p, const LlPlan& plan) {
    EP_CHECK(plan.sender_warps < plan.warps && plan.receiver_warps > 1, plan.sender_warps, " senders and ",
             plan.receiver_warps, " receivers of ", plan.warps, " warps: the last is the leader warp");
    EP_CHECK(!plan.is_shared() || can_share_blocks(p.is_heavy(), plan.steps),
             "rows that are not converted, in pieces of ", plan.steps, " steps, have no shared blocks");
    LlDispatchGeometry g;
    g.row = RowShape::of(p);
    const int pieces = ceil_div(g.row.steps, plan.steps), others = p.shape.num_ranks - 1;
    g.send_units = p.num_tokens * pieces;
    const int own_rows = sends(p.phase) ? p.num_tokens : p.shape.max_tokens;
    const int rows = own_rows + p.shape.max_tokens * others;
    if (plan.is_shared()) g.shared_blocks = plan.blocks;
    const int drawers = std::min(plan.receiver_warps, plan.warps - 1 - plan.receiver_warp0);  // not the leader warp
    g.last_routing_ticket = static_cast<uint32_t>(p.num_tokens + plan.blocks * drawers - 1);
    // Where blocks are shared, pieces are numbered as they are sent.
    const bool has_room = g.shared_blocks == 0 && static_cast<int64_t>(rows) * (pieces + 1) <= plan.receivers();
    g.numbers_piece = has_room ? pieces : 0;
    const int receive_pieces = pieces + (has_room ? 1 : 0);
    g.own_units = own_rows * receive_pieces;
    g.receive_units = rows * receive_pieces;
    if (g.shared_blocks > 0) {
      g.own_turns = g.own_units / g.shared_blocks;
      g.own_rest = g.own_units % g.shared_blocks;
    }
    g.by_receive_pieces = Divisor::of(receive_pieces);
    g.listeners = ceil_div(p.shape.num_ranks * p.shape.max_tokens, 32);
    if (g.listeners >= plan.receiver_warps) g.listeners = 0;
    g.by_pieces = Divisor::of(pieces);
    g.by_others = Divisor::of(others > 0 ? others : 1);
    g.by_max_tokens = Divisor::of(p.shape.max_tokens);
    g.by_id_words = Divisor::of(p.offsets.ids.words());
    g.by_local_experts = Divisor::of(p.output.local_experts);
    g.by_alignment = Divisor::of(p.output.alignment);
    const int64_t slices = p.output.has_parts() ? 0 : ceil_div<int64_t>(p.output.capacity, 32);  // of last_gap()
    g.gap_warps = static_cast<int>(std::max<int64_t>(p.output.bins(), slices));
    g.bitmap = RoutingBitmapShape::of(p);
    if (p.row.is_keyed && sends(p.phase)) g.given_scales = ScaleSource::of(p.scales);
    if (receives(p.phase) && p.is_heavy()) {
      const Scales& out = p.out_scales;
      const bool has_strides = !p.row.is_keyed && out.element_bytes == 4;
      EP_CHECK(has_strides || out.count == 0 || (out.group_stride == 1 && out.row_stride == out.count), "rows of ",
               out.count, " scales go out with strides ", out.row_stride, " and ", out.group_stride);
      g.out_scales = ScaleTarget::of(out);
    }
    return g;
  }

  // Shared blocks: piece number `turn` of those that a block places. Its own rank's come first, then those that the
  // blocks of the same number send, for each the ranks in turn. No less than receive_units: there is none.
  EP_HD int shared_unit(int block, int turn) const {
    const int own = own_turns + (block < own_rest ? 1 : 0);
    if (turn < own) return block + turn * shared_blocks;
    const int round = by_others.divide(turn - own);
    const int piece = block + round * shared_blocks;
    return own_units + piece * static_cast<int>(by_others.divisor) + by_others.remainder(turn - own, round);
  }
};

// A piece of a token's row, and the place of its home rank in the order of homes.
struct Unit {
  int home, piece, token;
};

// How pieces of rows, once for each home, are given to the sending warps. Piece number n is n % pieces of token n /
// pieces, and is sent by block n % blocks, or by another block of its group, n % groups.
//
// Each warp has its first unit, and a few have two, without a ticket. From number `first_number` on, a warp draws a
// ticket for each unit from the counter of its group, and ends when it draws one in vain. So as many tickets are drawn
// as there are units and warps together. The operation's last ticket is known, and there the counter wraps to zero,
// ready for the next operation.
struct WorkSchedule {
  int blocks = 1, warps = 1, homes = 1, pieces = 1;
  int num_static = 1;    // units of a block that need no ticket
  int first_number = 1;  // of pieces whose units need one
  int groups = 1, group_warps = 1;
  Divisor by_homes, by_pieces, by_groups;

  // `groups`: wanted. The number that is taken divides the blocks.
  static WorkSchedule of(int blocks, int warps, int pieces, int homes, int groups) {
    WorkSchedule schedule;
    schedule.blocks = blocks;
    schedule.warps = warps;
    schedule.homes = homes;
    schedule.pieces = pieces;
    const int numbers = ceil_div(warps, homes);  // of a block that need no ticket
    schedule.num_static = numbers * homes;
    schedule.first_number = numbers * blocks;
    schedule.groups = std::gcd(blocks, std::clamp(groups, 1, kMaxTicketGroups));
    schedule.group_warps = blocks / schedule.groups * warps;
    schedule.by_homes = Divisor::of(homes);
    schedule.by_pieces = Divisor::of(pieces);
    schedule.by_groups = Divisor::of(schedule.groups);
    return schedule;
  }

  EP_HD Unit unit(int home, int number) const {
    const int token = by_pieces.divide(number);
    return {home, by_pieces.remainder(number, token), token};
  }
  // A warp begins with the index-th unit of its block, index being its own number, and goes on in steps of `warps`.
  EP_HD bool is_static(int index) const { return index < num_static; }
  EP_HD Unit static_unit(int block, int index) const {
    const int round = by_homes.divide(index);
    return unit(by_homes.remainder(index, round), round * blocks + block);
  }
  // `tokens`: of the rank that has most.
  EP_HD bool has_tickets(int tokens) const { return tokens * pieces > first_number; }
  EP_HD int group_of(int block) const { return by_groups.remainder(block, by_groups.divide(block)); }
  EP_HD Unit dynamic_unit(int group, int ticket) const {
    const int round = by_homes.divide(ticket);
    return unit(by_homes.remainder(ticket, round), first_number + group + round * groups);
  }
  EP_HD int last_ticket(int group, int tokens) const {
    const int numbers = tokens * pieces - first_number - group;
    return (numbers > 0 ? by_groups.divide(numbers + groups - 1) * homes : 0) + group_warps - 1;
  }
};

// Receivers of an operation with so many own tokens do not compete with the senders: they load their first rows when
// the epoch is known.
constexpr int kBusyTokens = 16;

struct LlCombineGeometry {
  int output_rows = 0;                       // of the dispatch
  int homes = 0;                             // to send to; a send part counts itself among them
  int row_bytes = 0;                         // of the rows to add
  int map_k = 0;                             // entries of a token in the handle
  int home_step = 0;                         // from this rank to the first it sends to
  int sender_warps = 0, receiver_warps = 0;  // of blocks that have any, none for a phase that has no such role
  bool is_busy = false;
  WorkSchedule schedule;
  int receivers = 0;          // receiving warps, to which the pieces of own tokens go by their numbers
  uint32_t source_bytes = 0;  // from a source's rows in the window to the next one's
  Divisor by_local_experts;
  int row_lanes = 0, ring_bytes = 0;  // plan.streams: lanes' worths of a row; shared memory of a block

  // A ring of plan.streams: pieces of rows, each of so many steps.
  static constexpr int kStreamSteps = 4, kRingItems = 6, kRingBytes = kRingItems * kStreamSteps * kStepBytes;
  static constexpr int kCounterBytes = 16;

  // `lane_elements`: what a lane holds of a piece.
  static LlCombineGeometry of(const LlCombineParams& p, const LlPlan& plan, int lane_elements) {
    check(plan);
    LlCombineGeometry g;
    const int piece_elements = 32 * lane_elements * (plan.streams ? kStreamSteps : 1);
    g.row_lanes = p.hidden / lane_elements;
    if (plan.streams) g.ring_bytes = (plan.warps - 1) * kRingBytes + kCounterBytes;
    g.output_rows = static_cast<int>(p.output.rows());
    g.home_step = p.phase == Phase::kSend ? 0 : 1;
    g.homes = p.shape.num_ranks - g.home_step;
    g.row_bytes = p.hidden * size_of(p.dtype);
    g.map_k = p.output.map_k();
    g.sender_warps = sends(p.phase) && g.homes > 0 ? plan.sender_warps : 0;
    g.receiver_warps = receives(p.phase) ? plan.receiver_warps : 0;
    g.is_busy = p.num_tokens >= kBusyTokens;
    g.schedule = WorkSchedule::of(plan.sender_blocks, plan.sender_warps, ceil_div(p.hidden, piece_elements),
                                  g.homes > 0 ? g.homes : 1, plan.groups);
    g.receivers = plan.receivers();
    g.source_bytes = p.offsets.row_part_bytes;
    g.by_local_experts = Divisor::of(p.output.local_experts);
    return g;
  }

  // Senders send to the other ranks of the domain alone.
  void send_inside(const LlPlan& plan, int domain_size) {
    homes = domain_size - 1;
    if (homes == 0) sender_warps = 0;
    schedule =
        WorkSchedule::of(plan.sender_blocks, plan.sender_warps, schedule.pieces, std::max(homes, 1), plan.groups);
  }

  // No block waits for a block above its own (docs/memory_model.md).
  static void check(const LlPlan& plan) {
    EP_CHECK(plan.sender_warps < plan.warps && plan.receiver_warp0 + plan.receiver_warps < plan.warps,
             plan.sender_warps, " senders and ", plan.receiver_warps, " receivers from warp ", plan.receiver_warp0,
             " of ", plan.warps, " warps: the last is the leader warp");
    const bool is_contiguous = plan.sender_blocks == plan.blocks && plan.receiver_block0 == 0;
    const bool is_apart = plan.sender_blocks <= plan.receiver_block0 && plan.receiver_block0 < plan.blocks;
    EP_CHECK(is_apart || (is_contiguous && plan.sender_warps <= plan.receiver_warp0), plan.sender_warps,
             " senders in blocks [0, ", plan.sender_blocks, "), receivers from warp ", plan.receiver_warp0,
             " of blocks from ", plan.receiver_block0, " of ", plan.blocks,
             ": both in all blocks, on warps of their own, or senders below receivers");
  }
};

template <>
struct GeometryOf<LlDispatchParams> {
  using Type = LlDispatchGeometry;
};
template <>
struct GeometryOf<LlCombineParams> {
  using Type = LlCombineGeometry;
};

}  // namespace ep
