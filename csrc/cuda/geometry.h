// What a kernel would otherwise work out in every warp, from params and plan, before its first byte leaves: sizes of
// pieces, strides of work, divisors. Pure functions, so that they are tested anywhere.
#pragma once

#include "base/check.h"
#include "base/math.h"
#include "runtime/params.h"
#include "runtime/plan.h"

namespace ep {

// Sizes of a row in the units of a warp.
struct RowShape {
  int chunks = 0;          // of 16 bytes on the wire, side words apart
  int payload_chunks = 0;  // of them, the payload's
  int steps = 0;
  int side_offset = 0;
  int side_bytes = 0;  // of a step: 0, 4 or 16

  static RowShape of(const LlDispatchParams& p) {
    RowShape row;
    row.payload_chunks = p.row.payload_bytes / kLaneBytes;
    row.chunks = p.row.is_keyed ? p.row.body_bytes() / kLaneBytes : row.payload_chunks;
    row.steps = ceil_div(row.chunks, 32);
    row.side_offset = p.row.is_keyed ? p.row.keys_offset() : p.row.scales_offset();
    if (p.row.is_keyed || p.quant == Quant::kFp8Ue8m0) {
      row.side_bytes = 4;
    } else if (p.quant != Quant::kNone) {
      row.side_bytes = 16;
    }
    return row;
  }
};

// What a receiving block keeps in shared memory (places.cuh); offsets are in words of 32 bits.
struct PlacesShape {
  int slots = 0;     // (source, token) pairs: source * max_tokens + token
  int bins = 1;      // local experts, or one bin of all rows in rank layouts
  int words = 1;     // of a bin. Odd, so that threads that look at one word of many bins use different banks
  int id_words = 2;  // of a slot
  int bits_at = 0, tokens_at = 0, starts_at = 0;
  int64_t bytes = 0;

  static PlacesShape of(const LlDispatchParams& p) {
    PlacesShape shape;
    const int64_t slots = static_cast<int64_t>(p.shape.num_ranks) * p.shape.max_tokens;
    shape.bins = has_expert_rows(p.output.layout) ? p.output.local_experts : 1;
    shape.id_words = p.layout.ids.words();
    const int64_t words = ceil_div<int64_t>(slots, 32) | 1;
    const int64_t bits_at = slots * shape.id_words;
    const int64_t tokens_at = bits_at + align_up<int64_t>(shape.bins * words, 4);
    const int64_t starts_at = tokens_at + p.shape.num_ranks;
    shape.bytes = 4 * align_up<int64_t>(starts_at + shape.bins + 1, 4);
    shape.slots = static_cast<int>(slots);
    shape.words = static_cast<int>(words);
    shape.bits_at = static_cast<int>(bits_at);
    shape.tokens_at = static_cast<int>(tokens_at);
    shape.starts_at = static_cast<int>(starts_at);
    return shape;
  }
};

#if !defined(EP_D_ROTATE)  // 1: rows go to warps that do not wait for routing first
#define EP_D_ROTATE 0
#endif
#if !defined(EP_D_NUMBERS)  // 1: a row's numbers are stored by a warp of their own, where there are warps to spare
#define EP_D_NUMBERS 0
#endif

struct LlDispatchGeometry {
  RowShape row;
  int send_units = 0;     // pieces of own rows
  int own_units = 0;      // pieces of own rows to place; a receiving half does not know its tokens, only their limit
  int receive_units = 0;  // pieces of all rows there may be to place
  int numbers_piece = 0;  // the piece whose warp stores the row's numbers; past the row, if there are warps to spare
  int listeners = 0;      // warps of a receiving block that wait for routing, if not all do: they come last for rows
  Divisor by_pieces;      // of a row, to send
  Divisor by_receive_pieces;
  Divisor by_others;  // ranks but this one
  Divisor by_max_tokens;
  Divisor by_id_words;
  Divisor by_local_experts;
  PlacesShape places;

  static LlDispatchGeometry of(const LlDispatchParams& p, const LlPlan& plan) {
    EP_CHECK(plan.sender_warps < plan.warps && plan.receiver_warps > 1, plan.sender_warps, " senders and ",
             plan.receiver_warps, " receivers of ", plan.warps, " warps: the last opens the call");
    LlDispatchGeometry g;
    g.row = RowShape::of(p);
    const int pieces = ceil_div(g.row.steps, plan.steps), others = p.shape.num_ranks - 1;
    g.send_units = p.num_tokens * pieces;
    const int own_rows = sends(p.half) ? p.num_tokens : p.shape.max_tokens,
              rows = own_rows + p.shape.max_tokens * others;
    const bool has_room = static_cast<int64_t>(rows) * (pieces + 1) <= plan.receivers();
    g.numbers_piece = EP_D_NUMBERS && has_room ? pieces : 0;
    const int receive_pieces = pieces + (g.numbers_piece > 0 ? 1 : 0);
    g.own_units = own_rows * receive_pieces;
    g.receive_units = rows * receive_pieces;
    g.by_receive_pieces = Divisor::of(receive_pieces);
    g.listeners = ceil_div(p.shape.num_ranks * p.shape.max_tokens, 32);
    if (!EP_D_ROTATE || g.listeners >= plan.receiver_warps) g.listeners = 0;
    g.by_pieces = Divisor::of(pieces);
    g.by_others = Divisor::of(others > 0 ? others : 1);
    g.by_max_tokens = Divisor::of(p.shape.max_tokens);
    g.by_id_words = Divisor::of(p.layout.ids.words());
    g.by_local_experts = Divisor::of(p.output.local_experts);
    g.places = PlacesShape::of(p);
    return g;
  }
};

// Pieces of rows are dealt to blocks, the same on every rank: piece number u (of a row, rows one after the other) to
// block u % blocks. Inside a block the pieces, once for each home, go to the warps in turn. A warp goes on by adding
// its stride digit by digit; a carry of the home digit chooses the second of two steps.
struct UnitStride {
  int homes = 1, home_step = 0;
  int piece_step[2] = {0, 0}, token_step[2] = {0, 0};
  Divisor by_homes;

  static UnitStride of(int blocks, int warps, int pieces, int homes) {
    UnitStride stride;
    stride.homes = homes;
    stride.home_step = warps % homes;
    for (int carry = 0; carry < 2; carry++) {
      const int step = (warps / homes + carry) * blocks;
      stride.piece_step[carry] = step % pieces;
      stride.token_step[carry] = step / pieces;
    }
    stride.by_homes = Divisor::of(homes);
    return stride;
  }
};

struct LlCombineGeometry {
  int pieces = 1;       // of a row
  int output_rows = 0;  // of the dispatch
  int homes = 0;        // to send to; a sending half counts itself among them
  UnitStride send, sum;
  Divisor by_pieces;
  Divisor by_id_words;
  Divisor by_local_experts;

  // `lane_elements`: what a lane holds of a piece.
  static LlCombineGeometry of(const LlCombineParams& p, const LlPlan& plan, int lane_elements) {
    EP_CHECK(plan.sender_warps < plan.warps && plan.receiver_warp0 + plan.receiver_warps < plan.warps,
             plan.sender_warps, " senders and ", plan.receiver_warps, " receivers from warp ", plan.receiver_warp0,
             " of ", plan.warps, " warps: the last opens the call");
    LlCombineGeometry g;
    g.pieces = ceil_div(p.hidden, 32 * lane_elements);
    g.output_rows = static_cast<int>(p.output.rows());
    g.homes = p.shape.num_ranks - (p.half == Half::kSend ? 0 : 1);
    g.send = UnitStride::of(plan.blocks, plan.sender_warps, g.pieces, g.homes > 0 ? g.homes : 1);
    g.sum = UnitStride::of(plan.blocks, plan.receiver_warps, g.pieces, 1);
    g.by_pieces = Divisor::of(g.pieces);
    g.by_id_words = Divisor::of(p.layout.ids.words());
    g.by_local_experts = Divisor::of(p.output.local_experts);
    return g;
  }
};

}  // namespace ep
