// What low-latency dispatch sends: routing messages, and rows in pieces.
#pragma once

#include "cuda/ll/common/headers.cuh"
#include "cuda/ll/common/op_context.cuh"
#include "cuda/ll/common/routing_messages.cuh"
#include "cuda/ll/dispatch/payload.cuh"
#include "cuda/protocol/ids.cuh"
#include "cuda/protocol/kernel_args.h"
#include "cuda/testing/stamps.cuh"

namespace ep {
inline namespace EP_KERNELS {

template <Encoding kEncoding, int kSteps>
constexpr bool kCanShare = can_share_blocks(kEncoding != Encoding::kFloat, kSteps);

struct DispatchRole : WarpRole, RailPart {
  const LlDispatchParams& p;
  const LlDispatchGeometry& geometry;
  const LsaPeers& peers;

  __device__ int sender() const { return warp * plan.sender_blocks + at.block; }
  // Of the block's receivers.
  __device__ int receiver_index() const {
    const int index = warp - plan.receiver_warp0 - geometry.listeners;
    return index < 0 ? index + plan.receiver_warps : index;
  }
  __device__ int receiver() const {
    return receiver_index() * plan.receiver_blocks() + at.block - plan.receiver_block0;
  }
  // Where kShares is false the kernel is never launched with shared blocks.
  template <bool kShares>
  __device__ bool is_shared() const {
    return kShares && plan.is_shared();
  }
  // The piece that this warp places in its turn `round`, behind `last`.
  template <bool kShares>
  __device__ int unit_of(int round, int last) const {
    if (is_shared<kShares>()) return geometry.shared_unit(at.block, receiver_index() + round * plan.receiver_warps);
    return round == 0 ? receiver() : last + plan.receivers();
  }
  // Shared blocks wait for routing.
  template <bool kShares>
  __device__ bool draws_routing() const {
    return is_shared<kShares>() && p.phase == Phase::kFused;
  }
  template <bool kShares>
  __device__ bool is_drawer() const {
    return draws_routing<kShares>() && is_planned_receiver() && warp != plan.warps - 1;
  }
  // The first own token whose routing this warp sends without a ticket, if there is one; the leader warp comes last.
  template <bool kShares>
  __device__ int routing_token() const {
    if (draws_routing<kShares>()) return p.num_tokens;
    const int turn = warp == plan.warps - 1 ? plan.warps - 1 : plan.warps - 2 - warp;
    return turn * plan.sender_blocks + at.block;
  }
  // 0: the next one is drawn.
  template <bool kShares>
  __device__ int routing_step() const {
    return draws_routing<kShares>() ? 0 : plan.sender_blocks * plan.warps;
  }
  // The next own token that no warp has drawn; num_tokens and more: there is none. Lane 0 has it.
  __device__ uint32_t draw_token(DeviceState* state) const {
    uint32_t drawn;
    if (lane == 0) drawn = ptx::atom_inc_relaxed_gpu(&state->routing_tickets.next, geometry.last_routing_ticket);
    return drawn;
  }
  __device__ int receiving_thread() const { return threadIdx.x - plan.receiver_warp0 * 32; }
  __device__ int receiving_threads() const { return plan.receiver_warps * 32; }
  // All of them but the leader warp, which has other things to do first.
  __device__ int clearing_threads() const {
    return receiving_threads() - (plan.receiver_warp0 + plan.receiver_warps == plan.warps ? 32 : 0);
  }
  // Own rows of a fused operation never enter the window; a split call sends them to itself.
  __device__ bool sends_to_itself() const { return p.phase == Phase::kSend; }
};

// Expert id `lane` of an own token, as the caller gave it. Lanes past the last choice load that one.
__device__ __forceinline__ RawId own_id(const DispatchRole& role, int token) {
  const LlDispatchParams& p = role.p;
  return RawId::load(p.topk_idx, p.is_idx64,
                     static_cast<int64_t>(token) * p.shape.topk + min(role.lane, p.shape.topk - 1));
}

__device__ __forceinline__ Choice choice_of(const DispatchRole& role, RawId raw) {
  const LlDispatchParams& p = role.p;
  const int64_t id = role.lane < p.shape.topk ? raw.below(p.shape.num_experts, p.is_idx64) : -1;
  return Choice::of(id, p.shape.num_experts, role.geometry.by_local_experts);
}

static __device__ __noinline__ void report_invalid_id(const LlDispatchParams& p, DeviceState* state, int token) {
  const int k = lane_id();
  if (!p.options.reports_ids) return;
  const int64_t id = load_id(p.topk_idx, p.is_idx64, static_cast<int64_t>(token) * p.shape.topk + k);
  note_invalid_id(state, id, token, k);
}

__device__ __forceinline__ float own_weight(const DispatchRole& role, int token) {
  const LlDispatchParams& p = role.p;
  if (p.topk_weights == nullptr || role.lane >= p.shape.topk) return 1.0f;
  return __ldg(p.topk_weights + token * p.shape.topk + role.lane);
}

// The routing of an own token, ready to be sent as soon as the epoch is known.
struct OutgoingRouting {
  int token;
  RawId id;
  float weight = 1.0f;
  Choice choice;
  RoutingLane lane;

  __device__ __forceinline__ void load(const DispatchRole& role, int next) {
    token = next;
    if (token >= role.p.num_tokens) return;
    id = own_id(role, token);
    weight = own_weight(role, token);
  }
  // Between load() and prepare(), as it needs nothing that is loaded.
  __device__ __forceinline__ void compute_addr(const DispatchRole& role) {
    if (token >= role.p.num_tokens) return;
    lane = RoutingLane::at_addr(role.p.offsets, role.peers, role.geometry.by_id_words, 0, token);
  }
  __device__ __forceinline__ void prepare(const DispatchRole& role) {
    if (token >= role.p.num_tokens) return;
    choice = choice_of(role, id);
    lane.fill(role.p.offsets, role.peers, 0, choice, weight);
  }
};

__device__ __forceinline__ void send_token_routing(const DispatchRole& role, const WarpContext& op,
                                                   const OutgoingRouting& out) {
  const LlDispatchParams& p = role.p;
  if (out.token >= p.num_tokens) return;
  testing_point(Point::kBeforeRouting, op, out.token);
  out.lane.send(op, p.offsets, out.choice.rank);
  send_routing(op, p.offsets, role.peers, role.geometry.by_id_words, 1, out.token, out.choice, out.weight);
  if (role.lane >= p.shape.topk) return;
  p.handle.ids[out.token * p.shape.topk + role.lane] =
      out.choice.rank < 0 ? -1 : out.choice.rank * p.output.local_experts + out.choice.expert;
  if (out.choice.rank < 0) report_invalid_id(p, op.context.state, out.token);
}

// Shared blocks: what is left of the routing when this warp has sent that of `token`, which it has drawn.
static __device__ __noinline__ void send_drawn_routing(const DispatchRole role, const OpContext& op, int token) {
  OutgoingRouting out;
#pragma unroll 1
  while (token < role.p.num_tokens) {
    const uint32_t drawn = role.draw_token(op.state);
    if (role.p.options.all_weights) {
      const Choice choice = choice_of(role, own_id(role, token));
      send_other_weights(WarpContext(op), role.p.offsets, role.peers, role.p.shape.topk, token, choice.rank,
                         own_weight(role, token));
    }
    token = static_cast<int>(__shfl_sync(~0u, drawn, 0));
    out.load(role, token);
    out.compute_addr(role);
    out.prepare(role);
    send_token_routing(role, WarpContext(op), out);
    __syncwarp();
  }
}

// Token `first` and those that this warp sends after it: there are more tokens than warps. Then weights that only a
// call with all_weights sends, of all tokens of the warp: a function that it called for each would cost all calls
// registers.
template <bool kShares>
__device__ __noinline__ void send_rest_of_routing(const DispatchRole role, const OpContext& op, int first) {
  if constexpr (kShares) {
    if (role.is_drawer<true>()) return send_drawn_routing(role, op, first);
  }
  OutgoingRouting out;
#pragma unroll 1
  for (int token = first; token < role.p.num_tokens; token += role.routing_step<kShares>()) {
    out.load(role, token);
    out.compute_addr(role);
    out.prepare(role);
    send_token_routing(role, WarpContext(op), out);
    __syncwarp();
  }
  if (!role.p.options.all_weights) return;
#pragma unroll 1
  for (int token = role.routing_token<kShares>(); token < role.p.num_tokens; token += role.routing_step<kShares>()) {
    const Choice choice = choice_of(role, own_id(role, token));
    send_other_weights(WarpContext(op), role.p.offsets, role.peers, role.p.shape.topk, token, choice.rank,
                       own_weight(role, token));
    __syncwarp();
  }
}

// Tokens go to the warps of the sending blocks, from the last warp on, as the first warps have rows to send. Blocks
// that send alone have the lowest numbers, and wait for nothing except in block 0, so that blocks need not be resident
// together. Warps of shared blocks that receive draw tokens until there are none, before they wait for anything.
template <bool kShares>
__device__ __forceinline__ void send_all_routing(const DispatchRole& role, const WarpContext& op,
                                                 const OutgoingRouting& out) {
  testing_point(Point::kBeforeRouting, op);
  send_token_routing(role, op, out);
  const int next = out.token + role.routing_step<kShares>();
  __syncwarp();
  if (next < role.p.num_tokens || role.p.options.all_weights) send_rest_of_routing<kShares>(role, op, next);
}

// A piece of an own row, ready to be sent as soon as the epoch is known.
template <Encoding kEncoding, DType kType, int kSteps>
struct Outgoing {
  int asked;  // unit
  RawId id;
  Raw<kEncoding, kSteps> raw;
  int index;        // of the piece in its row; -1: nothing left to send
  Offset slot;      // in bank 0: where the lane's words begin
  LaneRanks turns;  // ranks that it goes to: number i is the i-th after this one
  PieceOf<kEncoding, kSteps> piece;

  __device__ __forceinline__ void load(const DispatchRole& role, int next) {
    asked = next;
    if (asked >= role.geometry.send_units) return;
    const int token = role.geometry.by_pieces.divide(asked);
    id = own_id(role, token);
    load_raw(role.p, role.geometry, token, role.geometry.by_pieces.remainder(asked, token), role.lane, raw);
  }
  // What was loaded is the next to be sent.
  __device__ __forceinline__ void prepare(const DispatchRole& role) {
    index = -1;
    if (asked >= role.geometry.send_units) return;
    const int token = role.geometry.by_pieces.divide(asked);
    index = role.geometry.by_pieces.remainder(asked, token);
    const int rank = role.peers.rank, num_ranks = role.p.shape.num_ranks;
    slot = role.p.offsets.row<kMasksRanks>(0, rank, token) + lane_offset<kSteps>(index, role.lane);
    const Choice choice = choice_of(role, id);
    const bool wanted =
        choice.rank >= 0 && reaches(role.peers, choice.rank) && (choice.rank != rank || role.sends_to_itself());
    const int turn = choice.rank - rank - 1 + (choice.rank <= rank ? num_ranks : 0);
    turns = LaneRanks::of(wanted ? turn : -1);
    encode<kEncoding, kType, kSteps>(role.p, raw, index, piece, role.lane);
  }
};

// Row pieces by 16-byte stores, to the ranks after this one first.
template <Encoding kEncoding, DType kType, int kSteps>
__device__ __forceinline__ void send_piece(const DispatchRole& role, const WarpContext& op,
                                           Outgoing<kEncoding, kType, kSteps>& out) {
  testing_point(Point::kBetweenRows, op, out.asked);
  char* const at_rank0 = role.peers.base + out.slot + op.bank * role.p.offsets.row_bank_bytes;
  out.load(role, out.asked + role.plan.senders());  // before the stores: it would wait behind them
  LaneRanks turns = out.turns;
  const bool may_be_masked = kMasksRanks && op.context.are_any_masked != 0;
#pragma unroll 1
  while (turns.has_more(role.p.shape.num_ranks)) {
    int peer = role.peers.rank + 1 + turns.take();
    if (peer >= role.p.shape.num_ranks) peer -= role.p.shape.num_ranks;
    if (may_be_masked && is_masked(op, peer)) continue;
    store_wire<RemoteStore>(at_rank0 + static_cast<uint32_t>(peer) * role.peers.stride, role.geometry.row, out.index,
                            out.piece, role.lane);
  }
}

// What a warp sends first has been loaded, and is prepared while the epoch is on its way. begin() waits for the epoch;
// false: nothing may be sent.
template <Encoding kEncoding, DType kType, int kSteps, class Begin>
__device__ __forceinline__ bool send_all(const DispatchRole& role, const WarpContext& op, OutgoingRouting& routing,
                                         Outgoing<kEncoding, kType, kSteps>& out, const Begin& begin) {
  routing.prepare(role);
  out.prepare(role);
  if (!begin()) return false;
  send_all_routing<kCanShare<kEncoding, kSteps>>(role, op, routing);
  testing_point(Point::kBeforeRows, op);
#pragma unroll 1
  while (out.index >= 0) {
    send_piece(role, op, out);
    out.prepare(role);
  }
  return true;
}

}  // namespace EP_KERNELS
}  // namespace ep
