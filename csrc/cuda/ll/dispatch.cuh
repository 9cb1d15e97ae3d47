// Low-latency dispatch: the kernel's table of contents is dispatch(), at the end.
//
// Rows travel in band: a slot of the receiver's window for each (source, token), full of kAbsent until words arrive.
// Where there is much to send, some blocks only send and the others only receive: a full queue of remote stores would
// hold up the loads of its SM. On few SMs, or with many tokens, all do both, as the SMs that only send would be
// missing.
#pragma once

#include "cuda/ll/common/ll_args.cuh"
#include "cuda/ll/dispatch/receive.cuh"

namespace ep {
inline namespace EP_KERNELS {

template <Encoding kEncoding, DType kType, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ void dispatch(const LlArgs<LlDispatchParams>& args, BlockPosition at, char* shared) {
  constexpr bool kShares = kCanShare<kEncoding, kSteps>;
  const LlDispatchParams& p = args.params;
  const LlPlan& plan = args.plan;
  const LsaPeers& peers = args.peers;
  EP_SHARED(OpContext, context);
  WarpContext op(context, WarpContext::NotYet{});
  const DispatchRole role{{plan, at, lane_id(), warp_id()}, RailPart::of(args), p, args.geometry, peers};
  const RoutingBitmap bitmap(shared, args.geometry.bitmap);
  stamp(Stamp::kStart, peers.rank);
  ptx::launch_dependents();
  const bool is_sending = sends(p.phase) && at.block < plan.sender_blocks;
  Outgoing<kEncoding, kType, kSteps> out;
  OutgoingRouting routing;
  out.asked = args.geometry.send_units;
  routing.token = is_sending ? role.routing_token<kShares>() : p.num_tokens;
  const bool is_drawer = is_sending && role.is_drawer<kShares>();
  ptx::wait_for_prerequisites();

  // What a warp sends first is loaded and prepared while the epoch is loaded.
  const Opening opening = open_op(context, args, Kind::kDispatch, [&] {
    if (!is_sending) return;
    if (is_drawer) routing.token = static_cast<int>(__shfl_sync(~0u, role.draw_token(args.state), 0));
    routing.load(role, routing.token);
    if (role.is_planned_sender()) out.load(role, role.sender());
    routing.compute_addr(role);
  });
  HeaderLane header;
  if (role.is_control()) header = HeaderLane::of(p.header, p.offsets, peers, role.lane);
  const bool is_receiver = receives(p.phase) && role.is_planned_receiver();
  if (is_receiver && !is_leader_warp()) bitmap.clear(role.receiving_thread(), role.clearing_threads());
  const auto begin = [&] {
    const bool is_ok = begin_op(context, op, args, opening);
    stamp(Stamp::kEpochKnown, peers.rank);
    return is_ok;
  };
  Incoming<kEncoding, kSteps, kLayout> in;
  const bool computes_addr_early =
      is_receiver && !is_leader_warp() && !is_sending && role.unit_of<kShares>(0, 0) < args.geometry.receive_units;
  bool is_ok;
  if (is_leader_warp()) {
    is_ok = begin();
    if (is_ok && sends(p.phase) && role.is_control()) send_headers(op, p.offsets, peers, *op.context.header, header);
    if (receives(p.phase)) advance_epoch(args, opening, Kind::kDispatch, at);
    if (is_ok && is_sending) {
      testing_point(Point::kBeforeRouting, op);
      send_rest_of_routing<kShares>(role, op, role.routing_token<kShares>());
    }
  } else if (is_sending) {
    is_ok = send_all(role, op, routing, out, begin);
    stamp(Stamp::kSent, peers.rank);
  } else {
    if (computes_addr_early) in.compute_addr(role, bitmap, role.unit_of<kShares>(0, 0));
    is_ok = begin();
  }
  if (!is_ok) return store_nothing<has_expert_rows(kLayout)>(role);

  if (sends(p.phase) && role.is_creditor()) send_credits(op, p.offsets, peers);
  if (receives(p.phase) && role.is_control()) check_headers(op, p.offsets, peers, *op.context.header, p.wait_cost);
  if (is_receiver) receive<kEncoding, kType, kSteps, kLayout>(role, op, bitmap, in, computes_addr_early);
  if constexpr (kCrossesDomains) {
    const bool is_last = at.block == at.num_blocks - 1 && is_leader_warp();
    if (receives(p.phase) && is_last && role.places_rows()) await_rest(op, args);
  }
  stamp(Stamp::kEnd, peers.rank);
}

}  // namespace EP_KERNELS
}  // namespace ep
