// Low-latency dispatch over several domains: the blocks of the rail. Senders send each link the record and the rows
// that go there, a row a token. Forwarders store what comes into the windows of the ranks that their link serves, as if
// the source had done it itself: the receiving code is that of one domain. Where a link serves one rank, only the
// record is forwarded, and receivers take rows from where the network puts them (LlRail::places_rows).
#pragma once

#include "cuda/ll/dispatch/receive.cuh"
#include "cuda/ll/links/forward.cuh"

namespace ep {
inline namespace EP_KERNELS {

struct DispatchRail : RailRole {
  const LlDispatchParams& p;
  const LlDispatchGeometry& geometry;
  int lane = lane_id(), warp = warp_id();

  __device__ DispatchRail(const LlArgs<LlDispatchParams>& args, int block)
      : RailRole(in_front(args, block)), p(args.params), geometry(args.geometry) {}

  __device__ int pieces() const { return static_cast<int>(geometry.by_pieces.divisor); }
};

// Rows of a share that go to a link, of `ids` [T, K]. All threads of a block call.
template <class Id>
__device__ __forceinline__ int mark_rows(const DispatchRail& role, ShareBits& bits, const Share& share, int link,
                                         Id id) {
  const int topk = role.p.shape.topk;
  const auto experts = ExpertsOfLink::of(role.rail, link, role.geometry.by_local_experts);
  bits.mark(share.count, topk, [&](int i) { return experts.has(id(share.first * topk + i)); });
  return bits.count_before(share.count);
}

// A slice of the own rows for a link.
template <Encoding kEncoding, DType kType, int kSteps>
__device__ __forceinline__ void send_rows(const DispatchRail& role, const WarpContext& op, ShareBits& bits,
                                          const RailUnit& unit) {
  const LlDispatchParams& p = role.p;
  if (is_masked_link(role, op, unit.link)) return;
  const Share share = Share::of(role.rail, p.num_tokens, unit.channel);
  const auto own_id = [&](int i) {
    return RawId::load(p.topk_idx, p.is_idx64, i).below(p.shape.num_experts, p.is_idx64);
  };
  const int rows = mark_rows(role, bits, share, unit.link, own_id);
  const int staging = role.bank_of_staging(op.bank, Kind::kDispatch), pieces = role.pieces();
  for (int u = unit.first_piece(); u < share.count * pieces; u += RailUnit::piece_step(role.rail)) {
    const int i = role.geometry.by_pieces.divide(u), index = role.geometry.by_pieces.remainder(u, i);
    if (!bits.has(i)) continue;
    testing_point(Point::kBetweenRows, op, u);
    Raw<kEncoding, kSteps> raw;
    PieceOf<kEncoding, kSteps> piece;
    load_raw(p, role.geometry, share.first + i, index, role.lane, raw);
    encode<kEncoding, kType, kSteps>(p, raw, index, piece, role.lane);
    const Offset row = role.rail.row_to(staging, unit.link, share.first + bits.count_before(i));
    store_wire<LocalStore>(role.peers.local<char>(row) + lane_offset<kSteps>(index, role.lane), role.geometry.row,
                           index, piece, role.lane);
  }
  post_rows(role, op, unit.link, unit.channel, share.first, rows);
}

// A slice of the record of a link's peer: header, ids and weights to all ranks that the own link serves.
__device__ __forceinline__ void forward_routing(const DispatchRail& role, const WarpContext& op, const RailUnit& unit) {
  const LlDispatchParams& p = role.p;
  const IncomingRecord record = IncomingRecord::of(role, op, unit.link, p.shape);
  const LsaPeers as_source = role.as_peer_of(unit.link);
  if (unit.slice == 0) forward_header(op, p.offsets, as_source, record);
  __syncwarp();
  for (int token = unit.first_piece(); token < record.tokens; token += RailUnit::piece_step(role.rail)) {
    testing_point(Point::kBeforeRouting, op, token);
    const int entry = token * p.shape.topk + role.lane;
    const bool is_choice = role.lane < p.shape.topk;
    const Choice choice =
        Choice::of(is_choice ? record.ids[entry] : -1, p.shape.num_experts, role.geometry.by_local_experts);
    const float weight = is_choice ? __uint_as_float(record.weights[entry]) : 1.0f;
    send_routing(op, p.offsets, as_source, role.geometry.by_id_words, 0, token, choice, weight);
    if (p.options.all_weights) send_other_weights(op, p.offsets, as_source, p.shape.topk, token, choice.rank, weight);
    __syncwarp();
  }
}

// A piece of a row that has come, to all ranks of the own link that have an expert of its token.
template <int kSteps, int kSides>
__device__ __forceinline__ void hand_out(const DispatchRail& role, const WarpContext& op, const IncomingRecord& record,
                                         int link, int token, int index, const Piece<kSteps, kSides>& piece) {
  const LlDispatchParams& p = role.p;
  const int first = role.rail.first_of(role.rail.link);
  const int id = role.lane < p.shape.topk ? record.ids[token * p.shape.topk + role.lane] : -1;
  const Choice choice = Choice::of(id, p.shape.num_experts, role.geometry.by_local_experts);
  const bool is_here = choice.rank >= 0 && role.rail.link_of(choice.rank) == role.rail.link;
  LaneRanks targets = LaneRanks::of(is_here ? choice.rank - first : -1);
  const Offset slot =
      p.offsets.row<kMasksRanks>(op.bank, role.rail.peer(link), token) + lane_offset<kSteps>(index, role.lane);
#pragma unroll 1
  while (targets.has_more(role.rail.link_size)) {
    const int target = first + targets.take();
    store_wire<RemoteStore>(role.peers.at<char>(target, slot), role.geometry.row, index, piece, role.lane);
  }
}

// A slice of a channel's rows, each to all ranks of the own link that have an expert of its token. False: a wait was
// given up.
template <Encoding kEncoding, int kSteps>
__device__ __forceinline__ bool forward_rows(const DispatchRail& role, const WarpContext& op, ShareBits& bits,
                                             const RailUnit& unit) {
  const LlDispatchParams& p = role.p;
  const LlRail& rail = role.rail;
  const IncomingRecord record = IncomingRecord::of(role, op, unit.link, p.shape);
  const Share share = Share::of(rail, record.tokens, unit.channel);
  mark_rows(role, bits, share, rail.link, [&](int i) { return record.ids[i]; });
  const Arrival arrival = await_channel(role, op, unit.link, unit.channel);
  if (arrival != Arrival::kCame) return arrival == Arrival::kLeftOut;
  if (has_bug(Bug::kSkippedChunk, Kind::kDispatch) && unit.channel == rail.row_channels / 2) return true;
  const int pieces = role.pieces(), count = share.count * pieces, step = RailUnit::piece_step(rail);
  struct Place {
    int i, index;  // token of the share, piece of its row
    bool has_come;
  };
  const auto place_of = [&](int u) -> Place {
    const int i = role.geometry.by_pieces.divide(u);
    return {i, role.geometry.by_pieces.remainder(u, i), u < count && bits.has(i)};
  };
  // Two pieces at once: their loads take longer than all the rest.
  constexpr int kAtOnce = 2;
  for (int u = unit.first_piece(); u < count; u += kAtOnce * step) {
    PieceOf<kEncoding, kSteps> loaded[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const Place at = place_of(u + n * step);
      if (!at.has_come) continue;
      const Offset row = rail.row_from(op.bank, unit.link, share.first + bits.count_before(at.i));
      load_wire(role.peers.local<char>(row) + lane_offset<kSteps>(at.index, role.lane), role.geometry.row, at.index,
                loaded[n], role.lane);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; n++) {
      const Place at = place_of(u + n * step);
      if (!at.has_come) continue;
      testing_point(Point::kBetweenRows, op, u + n * step);
      hand_out(role, op, record, unit.link, share.first + at.i, at.index, loaded[n]);
    }
  }
  return true;
}

__device__ __forceinline__ void send_own_record(const DispatchRail& role, const WarpContext& op) {
  const LlDispatchParams& p = role.p;
  const auto id = [&](int i) {
    return static_cast<int32_t>(RawId::load(p.topk_idx, p.is_idx64, i).below(p.shape.num_experts, p.is_idx64));
  };
  const auto weight = [&](int i) {
    return __float_as_uint(p.topk_weights != nullptr ? __ldg(p.topk_weights + i) : 1.0f);
  };
  send_record(role, op, *op.context.header, p.num_tokens * p.shape.topk, id, weight);
}

template <int kSteps, int kSides>
__device__ __forceinline__ bool load_from_link(const DispatchRole& role, const WarpContext& op,
                                               const RoutingBitmap& bitmap, const ReceiveUnit& unit,
                                               Piece<kSteps, kSides>& piece) {
  const LlRail& rail = *role.rail;
  const int link = rail.link_of(unit.source), tokens = bitmap.tokens(unit.source);
  const int channel = Share::channel_of(rail, tokens, unit.token), first = Share::of(rail, tokens, channel).first;
  const int slots = unit.source * role.p.shape.max_tokens;  // of the source
  const int row = first + bitmap.count_slots(slots + first, slots + unit.token);
  if (!await_channel_of_warp(role, op, link, channel)) return false;
  piece = {};
  if (has_bug(Bug::kSkippedChunk, Kind::kDispatch) && channel == rail.row_channels / 2) return true;
  load_wire(role.peers.local<char>(rail.row_from(op.bank, link, row)) + lane_offset<kSteps>(unit.piece, role.lane),
            role.geometry.row, unit.piece, piece, role.lane);
  return true;
}

// Blocks in front of the launch call it; the others, behind them, dispatch().
template <Encoding kEncoding, DType kType, int kSteps>
__device__ __forceinline__ void dispatch_rail(const LlArgs<LlDispatchParams>& args, int block) {
  const LlDispatchParams& p = args.params;
  EP_SHARED(OpContext, context);
  EP_SHARED(ShareBits, bits);
  WarpContext op(context, WarpContext::NotYet{});
  const DispatchRail role(args, block);
  const LlRail& rail = role.rail;
  const bool is_sender = block < rail.send_blocks;
  const RailOp begun(context, op, args, Kind::kDispatch, receives(p.phase), is_sender);
  if (!begun.is_ok()) return;
  if (is_sender) {
    if (!sends(p.phase)) return;
    if (role.index == 0) send_own_record(role, op);
    // Where there are as many blocks as units, the one that sends the record has nothing else to do.
    const int first = role.index > 0 ? role.index - 1 : role.step - 1;
    for (int number = rail.record_units() + first; number < rail.units(); number += role.step) {
      send_rows<kEncoding, kType, kSteps>(role, op, bits, RailUnit::of(rail, number));
    }
    return;
  }
  if (!receives(p.phase)) return;
  forward_all(role, op, rail.places_rows ? rail.record_units() : rail.units(), rail.slices, [&](const RailUnit& unit) {
    if (unit.channel > 0) return forward_rows<kEncoding, kSteps>(role, op, bits, unit);
    forward_routing(role, op, unit);
    return true;
  });
}

}  // namespace EP_KERNELS
}  // namespace ep
