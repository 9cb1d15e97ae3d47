// High-throughput combine, as a table of contents: a rank makes its rows readable (where they lie, or added up in the
// staging rows), the home ranks pull them and add the ranks up.
#pragma once

#include "cuda/ht/combine/pull.cuh"
#include "cuda/ht/common/recorded.cuh"
#include "cuda/testing/stamps.cuh"
#if defined(EP_NETWORK)
#include "cuda/ht/links/combine.cuh"
#endif

namespace ep {
inline namespace EP_KERNELS {

// kSignalled: rows may still be written (RowSignals). kTermsAlone: the call has no biases and no scale.
template <DType kIn, DType kWire, DType kOut, bool kSignalled, bool kTermsAlone>
__device__ __forceinline__ void combine_tokens(const HtArgs<HtCombineParams>& args, BlockPosition at, char* shared) {
  constexpr int kCount = kLaneElements<kIn, kWire, kOut>;
  const HtCombineParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(HtOpContext, op);
  const HtCombineRole role{
      {at},
      p,
      args.geometry,
      args.plan,
      peers,
      op,
      CombineTables::of(shared + args.geometry.tables_at, p.shape.num_ranks, args.plan.chunks, args.geometry.chunks),
      HtRailPart::of(args)};
  stamp(Stamp::kStart, peers.rank);
  ptx::wait_for_prerequisites();
  record_begin(p.recorded, role);
  if (!open_ht_op(op, args, Kind::kCombine, at, true, true)) return;
  if (role.is_first()) {
    clear_next_counters(op, role.num_ranks());
    const auto word_of = [&](int index) { return combine_word_of(p, index); };
    send_message(op, p.offsets, peers, kCombineMessageWords, word_of);
    const int32_t* rows = p.handle.counts + static_cast<int64_t>(peers.rank) * role.num_ranks();
    record_counts(p.recorded, role, role.num_ranks(), [&](int r) { return rows[r]; });
#if defined(EP_NETWORK)
    clear_next_rail_counters(op, role.part.rail);
    exchange_messages(op, p.offsets, peers, role.part, kCombineMessageWords, word_of);
#endif
  }
  await_headers(op, p.offsets, peers);
  fill_tables(role);
  if (block_has_failed(op)) return;
  if (role.is_first()) {
    const bool is_copied = p.has_rows() && !p.reads_in_place() && !has_expert_rows(p.output.layout);
    if (role.thread() == 0 && is_copied) op.state->ht_staged[1] += 1;
    if (p.options.weighting == Weighting::kHome && p.has_rows()) send_weights(role);
#if defined(EP_NETWORK)
    begin_crossing(role);
#endif
  }
  const bool stages = args.geometry.has_staging && role.warp >= args.plan.workers;
  const bool has_ring = role.warp < args.plan.warps;  // in a world on one GPU another rank's plan may have more warps
  stamp(Stamp::kEpochKnown, peers.rank);
  if (has_ring && stages) {
    stage_rows<kIn, kWire, kCount, kSignalled>(role, shared);
    stamp(Stamp::kSent, peers.rank);
  } else if (has_ring) {
#if defined(EP_NETWORK)
    add_up_domains<kIn, kWire, kOut, kCount>(role, shared);
#else
    pull_rows<kIn, kWire, kOut, kCount, kTermsAlone>(role, shared);
#endif
    stamp(Stamp::kOwnDone, peers.rank);
  }
  // The input belongs to the caller again when all ranks have read.
  if (role.is_first() && role.warp == 0) {
    await_all(role, HtSignal::kCombineDone, Awaited::kDone);
#if defined(EP_NETWORK)
    await_channels(op, role.part, kWeightsChannel, 1 + kHtRailChunks);
#endif
  }
  stamp(Stamp::kEnd, peers.rank);
}

template <DType kIn, DType kWire, DType kOut, bool kSignalled = false, bool kTermsAlone = false>
__device__ __forceinline__ void ht_combine(const HtArgs<HtCombineParams>& args, BlockPosition at, char* shared) {
  combine_tokens<kIn, kWire, kOut, kSignalled, kTermsAlone>(args, at, shared);
  record_end(args.params.recorded, at);
}

}  // namespace EP_KERNELS
}  // namespace ep
