// The second kernel of a high-throughput dispatch, as a table of contents: rows and metadata go out and come in.
#pragma once

#include "cuda/ht/common/recorded.cuh"
#include "cuda/ht/dispatch/metadata.cuh"
#include "cuda/ht/dispatch/receive.cuh"
#include "cuda/ht/dispatch/send.cuh"
#include "cuda/testing/stamps.cuh"
#if defined(EP_NETWORK)
#include "cuda/ht/links/forward.cuh"
#endif

namespace ep {
inline namespace EP_KERNELS {

// kCopies: the rank may have rows to copy.
template <bool kQuant, bool kCopies>
__device__ __forceinline__ void send_and_receive(const HtArgs<HtDispatchParams>& args, BlockPosition at, char* shared) {
  const HtDispatchParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(HtOpContext, op);
  HtBlock block{at};
  const bool is_worker = block.warp < args.plan.workers_of(at.block);
  // In a world on one GPU another rank's plan may have more warps.
  const bool helps = !is_worker && block.warp < args.plan.warps && at.block >= args.plan.senders;
  const ReceiveRole role{{block, p, args.geometry, args.plan, peers, op, SendTables::of(shared, p, args.geometry),
                          shared + (is_worker ? block.warp : 0) * args.geometry.stage_bytes, HtRailPart::of(args)}};
  stamp(Stamp::kStart, peers.rank);
  const bool has_routed = role.routes_meanwhile();
  if (!has_routed) {
    ptx::wait_for_prerequisites();
    record_begin(p.recorded, block);
  }
  if (!open_ht_op(op, args, Kind::kDispatch, at, !has_routed, true)) {
    ptx::wait_for_prerequisites();
    if (helps) clear_all(role);
    return;
  }
  if (!has_routed) {
    if (block.is_first()) {
      clear_next_counters(op, role.num_ranks());
      const auto word_of = [&](int index) { return message_word_of(p, index); };
      send_message(op, p.offsets, peers, HtMessage::kCounts, word_of);
#if defined(EP_NETWORK)
      clear_next_rail_counters(op, role.part.rail);
      exchange_messages(op, p.offsets, peers, role.part, HtMessage::kCounts, word_of);
#endif
    }
    await_headers(op, p.offsets, peers);
  }
#if defined(EP_NETWORK)
  CrossingWorker sender(role);
#else
  RowSender sender(role);
#endif
  if (is_worker) sender.begin();
  prepare(role);
  ptx::wait_for_prerequisites();
  if (is_worker) sender.prefetch_route();
  // The buffer may have failed since the operation was opened: in the routing kernel, or because of another rank.
  if (block.thread() == 0 && ptx::ld_relaxed_gpu(&args.state->failure_flag.has_failed) != 0) op.has_given_up = 1;
  if (block.is_first() && block.thread() == 0 && args.geometry.has_staged) op.state->ht_staged[0] += 1;
  if (block_has_failed(op)) {
    if (is_worker) sender.drop();
    if (helps) clear_all(role);
    return;
  }
  stamp(Stamp::kEpochKnown, peers.rank);
  if (is_worker) sender.run<kQuant>();
  stamp(Stamp::kSent, peers.rank);
  if (!helps) return;
  const bool with_routes = sends_metadata(p.variant);
  if (with_routes) send_metadata(role);
  if (has_routed && at.block == at.num_blocks - 1 && role.helper() == 0) store_info(p, op, role.tables);
  if (at.block == at.num_blocks - 1 && role.helper() == 0) plan_arrivals(role);
  clear_gaps(role);
  if (with_routes && !await_routes(role)) return give_up(role);
  const bool with_choices = with_routes && !has_expert_rows(p.output.layout);
  if (!kCrossesDomains && with_choices) store_choices(role);
  stamp(Stamp::kOwnDone, peers.rank);
  if (!place_rows<kCopies>(role)) return give_up(role);
  if (kCrossesDomains && with_choices) store_choices(role);  // those of other domains have come with the rows
  stamp(Stamp::kEnd, peers.rank);
}

template <bool kQuant, bool kCopies>
__device__ __forceinline__ void ht_send(const HtArgs<HtDispatchParams>& args, BlockPosition at, char* shared) {
  send_and_receive<kQuant, kCopies>(args, at, shared);
  record_end(args.params.recorded, at);
}

}  // namespace EP_KERNELS
}  // namespace ep
