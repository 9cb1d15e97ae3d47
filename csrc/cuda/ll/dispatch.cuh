// Low-latency dispatch: the kernel's table of contents is dispatch(), at the end.
//
// Rows travel in band: a slot of the receiver's window for each (source, token), full of kAbsent until words arrive.
// Where there is much to send, some blocks only send and the others only receive: a full queue of remote stores would
// hold up the loads of its SM.
#pragma once

#include "cuda/ll/dispatch_receive.cuh"

namespace ep {
inline namespace EP_KERNELS {

template <Payload kPayload, DType kType, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ void dispatch(const KernelArgs<LlDispatchParams>& args, BlockPosition at, char* shared) {
  const LlDispatchParams& p = args.params;
  const LlPlan& plan = args.plan;
  const LsaPeers& peers = args.peers;
  EP_SHARED(CallContext, context);
  OpenCall call(context, OpenCall::NotYet{});
  const DispatchRole role{{plan, at, lane_id(), warp_id()}, p, args.geometry, peers};
  const Places places(shared, args.geometry.places);
  stamp(Stamp::kStart, peers.rank);
  ptx::launch_dependents();
  const bool is_sending = sends(p.half) && at.block < plan.sender_blocks;
  Outgoing<kPayload, kType, kSteps> out;
  OutgoingRouting routing;
  out.asked = args.geometry.send_units;
  routing.token = is_sending ? role.routing_token() : p.num_tokens;
  ptx::wait_for_prerequisites();

  // What a warp sends first is on its way, and is made ready, while the epoch is.
  const Opening opening = open_call(context, args, Kind::kDispatch, [&] {
    if (!is_sending) return;
    routing.load(role, routing.token);
    if (role.is_planned_sender()) out.load(role, role.sender());
    routing.aim(role);
  });
  RecordLane record;
  if (role.is_control()) record = RecordLane::of(p.call, p.layout, peers, role.lane);
  const bool is_receiver = receives(p.half) && role.is_planned_receiver();
  if (is_receiver && !is_opener()) places.clear(role.receiving_thread(), role.clearing_threads());
  const auto begin = [&] {
    const bool is_well = begin_call(context, call, args, opening);
    stamp(Stamp::kEpochKnown, peers.rank);
    return is_well;
  };
  Incoming<kPayload, kSteps, kLayout> in;
  const bool aims_early = is_receiver && !is_opener() && !is_sending && role.receiver() < args.geometry.receive_units;
  bool is_well;
  if (is_opener()) {
    is_well = begin();
    if (is_well && sends(p.half) && role.is_control()) send_records(call, p.layout, peers, record);
    if (receives(p.half)) advance_epoch(args, opening, Kind::kDispatch, at);
    if (is_well && is_sending) {
      testing_point(Point::kBeforeRouting, call);
      send_further_routing(role, call, role.routing_token());
    }
  } else if (is_sending) {
    is_well = send_all(role, call, routing, out, begin);
    stamp(Stamp::kSent, peers.rank);
  } else {
    if (aims_early) in.aim(role, places, role.receiver());
    is_well = begin();
  }
  if (!is_well) return store_nothing<has_expert_rows(kLayout)>(role);

  if (sends(p.half) && role.is_creditor()) send_credits(call, p.layout, peers);
  if (receives(p.half) && role.is_control()) check_records(call, p.layout, peers, p.wait_cost);
  if (is_receiver) receive<kPayload, kType, kSteps, kLayout>(role, call, places, in, aims_early);
  stamp(Stamp::kEnd, peers.rank);
}

}  // namespace EP_KERNELS
}  // namespace ep
