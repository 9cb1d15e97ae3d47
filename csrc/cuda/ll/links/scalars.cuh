// Scalars of expert rows on their way home over several domains, in place of combine's rows: the rank that a home
// rank's link leads to collects those of the ranks that it serves. The home rank's record tells whose they are.
//
// A row channel of all homes is the same block's on every rank, so that a block waits for blocks of its own number, and
// for those in front.
#pragma once

#include "cuda/ll/links/forward.cuh"

namespace ep {
inline namespace EP_KERNELS {

// Blocks in front of the launch: the record to the links, and the op headers of theirs to the ranks that the
// own link serves.
__device__ __forceinline__ void scalars_front(const LlArgs<LlCombineWeightsParams>& args, int block) {
  const LlCombineWeightsParams& p = args.params;
  EP_SHARED(OpContext, context);
  WarpContext op(context, WarpContext::NotYet{});
  const RailRole role = RailRole::in_front(args, block);
  const bool is_sender = block < role.rail.send_blocks;
  const bool sends_records = is_sender && role.index == 0;
  uint32_t handle = 0;  // the first warp has it, which stores the header
  const RailOp begun(context, op, args, Kind::kCombine, true, is_sender, [&] {
    if (sends_records && warp_id() == 0) handle = CombineHeader::load(p.handle);
  });
  if (!begun.is_ok()) return;
  if (is_sender) {
    if (!sends_records) return;
    const auto id = [&](int i) { return p.handle.ids[i]; };
    const CombineHeader header{*op.context.header, handle};
    return send_record(role, op, header, p.num_tokens * p.shape.topk, id, [](int) { return 0u; });
  }
  forward_all(role, op, role.rail.others(), 1, [&](const RailUnit& unit) {
    forward_header(op, p.offsets, role.as_peer_of(unit.link), IncomingRecord::of(role, op, unit.link, p.shape));
    return true;
  });
}

// The own scalars of tokens of all homes.
__device__ __forceinline__ void send_scalars(const RailRole& role, const WarpContext& op,
                                             const LlCombineWeightsParams& p, int channel) {
  const int topk = p.shape.topk, map_k = p.output.map_k();
  const bool expert_rows = has_expert_rows(p.output.layout);
  for (int home = 0; home < p.shape.num_ranks; home++) {
    if (is_masked(op, home)) continue;
    const Share share = Share::of(role.rail, min(p.handle.tokens[home], p.shape.max_tokens), channel);
    for (int i = threadIdx.x; i < share.count * topk; i += static_cast<int>(blockDim.x)) {
      const int token = share.first + i / topk, k = i % topk;
      const int32_t row = p.handle.rows[p.offsets.slot(home, token) * map_k + (expert_rows ? k : 0)];
      if (row == kNoRow) continue;
      const bool is_there = row >= 0 && row < p.output.rows();  // else dropped, or of a handle that was changed
      const float value = is_there ? p.values[expert_rows ? row : static_cast<int64_t>(row) * topk + k] : 0.0f;
      const Offset there = p.offsets.weight<kMasksRanks>(op.bank, slot_source(role.peers, home), token, k);
      auto* target = role.peers.at<uint64_t>(target_of(role.peers, home), there);
      ptx::st_relaxed_sys(target, tagged(__float_as_uint(value), op.tag));
    }
  }
}

// The scalars of the ranks that the own link serves, for a link's home rank. False: a wait was given up.
__device__ __forceinline__ bool send_domain_scalars(const RailRole& role, const WarpContext& op,
                                                    const LlCombineWeightsParams& p, int link, int channel) {
  const LlRail& rail = role.rail;
  if (is_masked_link(role, op, link)) return true;
  const Arrival arrival = await_channel(role, op, link, 0);
  if (arrival != Arrival::kCame) return arrival == Arrival::kLeftOut;
  const IncomingRecord record = IncomingRecord::of(role, op, link, p.shape);
  const Share share = Share::of(rail, record.tokens, channel);
  const int topk = p.shape.topk, first_source = rail.first_of(link);
  const int staging = role.bank_of_staging(op.bank, Kind::kCombine);
  for (int i = threadIdx.x; i < share.count * topk; i += static_cast<int>(blockDim.x)) {
    const int token = share.first + i / topk, k = i % topk, id = record.ids[token * topk + k];
    uint32_t bits = 0;
    if (p.shape.valid(id) && rail.link_of(p.shape.owner(id)) == rail.link) {
      const int owner = p.shape.owner(id), source = first_source + owner % rail.link_size;
      const auto* word = role.peers.local<uint64_t>(p.offsets.weight<kMasksRanks>(op.bank, source, token, k));
      bits = await_word(op, word, Awaited::kScalars, owner);
    }
    role.peers.local<uint32_t>(rail.row_to(staging, link, token))[k] = bits;
  }
  if (__syncthreads_or(op.context.has_failed())) return false;
  post_rows(role, op, link, channel, share.first, share.count);
  return true;
}

// Of the own tokens, all links have sent theirs.
__device__ __forceinline__ void receive_scalars(const RailRole& role, const WarpContext& op,
                                                const LlCombineWeightsParams& p, int channel) {
  const LlRail& rail = role.rail;
  const Share share = Share::of(rail, p.num_tokens, channel);
  const int topk = p.shape.topk;
  for (int i = threadIdx.x; i < share.count * topk; i += static_cast<int>(blockDim.x)) {
    const int token = share.first + i / topk, k = i % topk, id = p.handle.ids[token * topk + k];
    uint32_t bits = 0;
    const int owner = p.shape.valid(id) ? p.shape.owner(id) : -1;
    if (owner >= 0 && !is_masked(op, owner)) {
      if (reaches(role.peers, owner)) {
        const auto* word = role.peers.local<uint64_t>(p.offsets.weight<kMasksRanks>(op.bank, owner, token, k));
        bits = await_word(op, word, Awaited::kScalars, owner);
      } else if (!is_masked_now(op, owner)) {
        const Offset row = rail.row_from(op.bank, rail.link_of(owner), token);
        bits = ptx::ld_relaxed_sys(role.peers.local<uint32_t>(row) + k);
      }
    }
    p.out[token * topk + k] = __uint_as_float(bits);
  }
}

// The other blocks. `at`: among themselves.
__device__ __forceinline__ void scalars_home_by_rail(const LlArgs<LlCombineWeightsParams>& args, BlockPosition at) {
  const LlCombineWeightsParams& p = args.params;
  EP_SHARED(OpContext, context);
  WarpContext op(context, WarpContext::NotYet{});
  const RailRole role{args.rail, args.peers, EP_NETWORK(args.network), at.block, at.num_blocks};
  const bool is_control = at.block == 0 && threadIdx.x < 32;
  uint32_t handle = 0;  // the control warp has it
  const RailOp begun(context, op, args, Kind::kCombine, true, false, [&] {
    if (is_control) handle = CombineHeader::load(p.handle);
  });
  if (!begun.is_ok()) return;
  const CombineHeader header{*op.context.header, handle};
  if (is_control) {
    send_headers(op, p.offsets, args.peers, header);
    send_credits(op, p.offsets, args.peers);
  }
  testing_point(Point::kBeforeRows, op);
  for (int channel = 1 + at.block; channel < role.rail.channels(); channel += at.num_blocks) {
    send_scalars(role, op, p, channel);
  }
  bool is_ok = true;
  for (int channel = 1 + at.block; channel < role.rail.channels(); channel += at.num_blocks) {
    for (int i = 0; is_ok && i < role.rail.others(); i++) {
      is_ok = send_domain_scalars(role, op, p, role.rail.other(i), channel);
    }
  }
  if (is_control) check_headers(op, p.offsets, args.peers, header);
  testing_point(Point::kBeforeReceive, op);
  // A channel without scalars for this rank is waited for as well: it must not land in a later call.
  for (int channel = 1 + at.block; channel < role.rail.channels(); channel += at.num_blocks) {
    for (int i = 0; is_ok && i < role.rail.others(); i++) {
      is_ok = await_channel(role, op, role.rail.other(i), channel) != Arrival::kFailed;
    }
    if (is_ok) receive_scalars(role, op, p, channel);
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
