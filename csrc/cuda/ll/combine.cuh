// Low-latency combine: every rank adds up its own experts' rows of a token and stores one row into the home rank's
// window, in band; the home rank adds the ranks' rows in rank order. The table of contents is combine(), at the end.
#pragma once

#include "cuda/ll/combine/receive.cuh"
#include "cuda/ll/combine/send.cuh"
#include "cuda/ll/combine/signalled_rows.cuh"
#include "cuda/ll/combine/streamed_rows.cuh"

namespace ep {
inline namespace EP_KERNELS {

// kHome: home ranks give weights. kUnweighted: and the combine is split, with rows that travel unweighted. kSignalled:
// it is the send alone, which waits for the rows' signals.
template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted = false, bool kSignalled = false>
__device__ __forceinline__ void combine(const LlArgs<LlCombineParams>& args, BlockPosition at) {
  constexpr int kCount = kLaneElements<kIn, kWire, kOut>;
  const LlCombineParams& p = args.params;
  const LlPlan& plan = args.plan;
  const LsaPeers& peers = args.peers;
  EP_SHARED(OpContext, context);
  WarpContext op(context, WarpContext::NotYet{});
  const CombineRole role{{plan, at, lane_id(), warp_id()}, RailPart::of(args), p, args.geometry, peers, args.state};
  stamp(Stamp::kStart, peers.rank);
  // The next kernel must not take SMs that the one waited for needs.
  if constexpr (!kSignalled) ptx::launch_dependents();
  // While the kernels before this one end.
  std::conditional_t<kSignalled, SignalledSender<kIn, kCount>, Sender<kIn, kWire, kCount, kHome, kUnweighted>> sender;
  std::conditional_t<kSignalled, NoReceiver, Receiver<kIn, kWire, kOut, kCount, kHome, kUnweighted>> receiver;
  bool is_sender = false, is_receiver = false;
  if (!is_leader_warp()) {
    is_sender = role.is_sender();
    is_receiver = role.is_receiver();
    if (is_sender) {
      sender.locate_first(role);
    } else if (is_receiver) {
      receiver.locate_first(role);
    }
  }
  ptx::wait_for_prerequisites();
  HomeWeights<kHome, kUnweighted> home_weights(role);
  uint32_t handle = 0;  // the control warp has it
  const Opening opening = open_op(
      context, args, Kind::kCombine,
      [&] {
        if (is_sender) sender.prefetch_first(role);
        if (is_receiver) receiver.prefetch_first(role);
        home_weights.prefetch(role);
      },
      [&] {
        if (role.is_control()) handle = CombineHeader::load(p.handle);
      });

  const auto begin = [&] {
    const bool is_ok = begin_op(context, op, args, opening);
    stamp(Stamp::kEpochKnown, peers.rank);
    if (is_ok) home_weights.send(role, op);
    return is_ok;
  };
  // What a warp adds up first is ready when the epoch is known. The leader warp is neither sender nor receiver.
  if (is_leader_warp()) {
    const bool is_ok = begin();
    const CombineHeader header{*op.context.header, handle};
    if (is_ok && sends(p.phase) && role.is_control()) send_headers(op, p.offsets, peers, header);
    if (receives(p.phase)) advance_epoch(args, opening, Kind::kCombine, at);
    if (!is_ok) return;
    if (sends(p.phase) && role.is_creditor()) send_credits(op, p.offsets, peers);
    if (receives(p.phase) && role.is_control()) check_headers(op, p.offsets, peers, header, p.wait_cost);
    if constexpr (kCrossesDomains) {
      if (receives(p.phase) && at.block == at.num_blocks - 1) await_rest(op, args);
    }
  } else if (is_sender) {
    sender.send_all(role, op, [&] {
      if (!begin()) return false;
      testing_point(Point::kBeforeRows, op);
      return true;
    });
    stamp(Stamp::kSent, peers.rank);
  } else if (is_receiver) {
    receiver.sum_all(role, op, [&] {
      if (!begin()) return false;
      testing_point(Point::kBeforeReceive, op);
      return true;
    });
  } else {
    begin();
  }
  stamp(Stamp::kEnd, peers.rank);
}

// The same on few SMs, where rows come through rings in shared memory.
template <DType kType, bool kHome>
__device__ __forceinline__ void combine_streamed(const LlArgs<LlCombineParams>& args, BlockPosition at, char* shared) {
  const LlCombineParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(OpContext, context);
  WarpContext op(context, WarpContext::NotYet{});
  const CombineRole role{
      {args.plan, at, lane_id(), warp_id()}, RailPart::of(args), p, args.geometry, peers, args.state};
  stamp(Stamp::kStart, peers.rank);
  ptx::launch_dependents();
  if (is_leader_warp()) *unit_counter(role, shared) = 0;
  ptx::wait_for_prerequisites();
  HomeWeights<kHome> home_weights(role);
  uint32_t handle = 0;  // the control warp has it
  const Opening opening = open_op(
      context, args, Kind::kCombine, [&] { home_weights.prefetch(role); },
      [&] {
        if (role.is_control()) handle = CombineHeader::load(p.handle);
      });
  const auto begin = [&] {
    const bool is_ok = begin_op(context, op, args, opening);
    stamp(Stamp::kEpochKnown, peers.rank);
    if (is_ok) home_weights.send(role, op);
    return is_ok;
  };
  if (is_leader_warp()) {
    const bool is_ok = begin();
    const CombineHeader header{*op.context.header, handle};
    if (is_ok && role.is_control()) send_headers(op, p.offsets, peers, header);
    advance_epoch(args, opening, Kind::kCombine, at);
    if (!is_ok) return;
    if (role.is_creditor()) send_credits(op, p.offsets, peers);
    if (role.is_control()) check_headers(op, p.offsets, peers, header, p.wait_cost);
  } else {
    stream_rows<kType, kHome>(role, op, shared, begin);
  }
  stamp(Stamp::kEnd, peers.rank);
}

// ---- Scalars instead of rows: every thread takes some (token, choice).

__device__ __forceinline__ void scalars_home(const KernelArgs<LlCombineWeightsParams>& args, BlockPosition at) {
  const LlCombineWeightsParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(OpContext, context);
  WarpContext op(context, WarpContext::NotYet{});
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();
  const bool is_control = at.block == 0 && threadIdx.x < 32;
  uint32_t handle = 0;  // the control warp has it
  const Opening opening = open_op(context, args, Kind::kCombine, [&] {
    if (is_control) handle = CombineHeader::load(p.handle);
  });
  const CombineHeader header{*op.context.header, handle};
  const bool is_ok = begin_op(context, op, args, opening);
  advance_epoch(args, opening, Kind::kCombine, at);
  if (!is_ok) return;
  const int topk = p.shape.topk, map_k = p.output.map_k();
  const bool expert_rows = has_expert_rows(p.output.layout);
  // Entry (token, k) is the same block's on every rank, for all homes: a block waits only for blocks of its own index.
  const int first = at.block * static_cast<int>(blockDim.x) + threadIdx.x;
  const int step = at.num_blocks * static_cast<int>(blockDim.x);
  if (is_control) {
    send_headers(op, p.offsets, peers, header);
    send_credits(op, p.offsets, peers);
  }
  testing_point(Point::kBeforeRows, op);
  for (int i = first; i < p.shape.max_tokens * topk; i += step) {
    const int token = i / topk, k = i % topk;
    for (int home = 0; home < p.shape.num_ranks; home++) {
      if (is_masked(op, home)) continue;
      if (token >= p.handle.tokens[home]) continue;
      const int32_t row = p.handle.rows[p.offsets.slot(home, token) * map_k + (expert_rows ? k : 0)];
      if (row == kNoRow) continue;
      const bool is_there = row >= 0 && row < p.output.rows();  // else dropped, or of a handle that was changed
      const float value = is_there ? p.values[expert_rows ? row : static_cast<int64_t>(row) * topk + k] : 0.0f;
      auto* target = peers.at<uint64_t>(home, p.offsets.weight<kMasksRanks>(op.bank, peers.rank, token, k));
      ptx::st_relaxed_sys(target, tagged(__float_as_uint(value), op.tag));
    }
  }
  if (is_control) check_headers(op, p.offsets, peers, header);
  testing_point(Point::kBeforeReceive, op);
  for (int i = first; i < p.num_tokens * topk; i += step) {
    const int id = p.handle.ids[i];
    uint32_t bits = 0;
    const int owner = p.shape.valid(id) ? p.shape.owner(id) : -1;
    if (owner >= 0 && !is_masked(op, owner)) {
      const auto* word = peers.local<uint64_t>(p.offsets.weight<kMasksRanks>(op.bank, owner, i / topk, i % topk));
      bits = await_word(op, word, Awaited::kScalars, owner);
    }
    p.out[i] = __uint_as_float(bits);
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
