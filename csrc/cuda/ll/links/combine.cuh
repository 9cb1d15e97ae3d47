// Low-latency combine over several domains. The ranks of a domain store their partial sums of another domain's tokens
// into the window of the home rank's rail peer there. Its blocks of the rail add them up in rank order, round the
// sum to the wire dtype and send it home, one row a token and domain; home ranks add the domains in order. In the mesh
// each rank is its own peer: its blocks of the rail send its partial sums, and home ranks add up the domains, too.
//
// A weight that the home rank gives comes with its record; forwarders store it where the expert's rank looks for it. In
// a split call the ranks of a domain store the rows instead of sums. The rank that adds them up takes the weights from
// the record, in its receive: the send waits for no rank.
//
// Where a link serves one rank, and the operation is whole, blocks of the rail add up the rows where they lie, and
// nothing of them goes through the own window (LlRail::adds_rows).
#pragma once

#include "cuda/ll/combine/receive.cuh"
#include "cuda/ll/combine/send.cuh"
#include "cuda/ll/links/forward.cuh"

namespace ep {
inline namespace EP_KERNELS {

// Of a share of a home rank's tokens: which ranks that the own link serves have a partial sum of each.
struct ShareSources {
  ShareBits any;
  uint32_t words[kMaxShareWords];  // as many for each token as the link's ranks need

  // Those of a token, numbered from the first rank that the link serves: as LaneRanks has the ranks of lanes.
  struct Ranks {
    const uint32_t *next, *end;  // words behind `word`
    uint32_t word;
    int first_rank;

    __device__ __forceinline__ int first() const { return first_rank; }
    __device__ __forceinline__ bool has_more(int) const {
      bool is_any = word != 0;
      for (const uint32_t* at = next; at < end; at++) is_any = is_any || *at != 0;
      return is_any;
    }
    __device__ __forceinline__ void find() {
      while (word == 0) {
        word = *next++;
        first_rank += 32;
      }
    }
  };
  __device__ __forceinline__ Ranks of(const LlRail& rail, int i, int first) const {
    const int count = RankMask::words_of(rail.link_size);
    const uint32_t* at = words + i * count;
    return {at + 1, at + count, *at, first};
  }
  // All threads of a block wait until the ranks have said it. False: a wait was given up.
  __device__ __forceinline__ bool await(const LlRail& rail, const WarpContext& op, const LlCombineParams& p,
                                        const LsaPeers& peers, int link, const Share& share) {
    const int first = rail.first_of(rail.link), first_source = rail.first_of(link), size = rail.link_size;
    const int per_token = RankMask::words_of(size);
    __syncthreads();  // the share before is done
    any.clear();
    for (int i = threadIdx.x; i < share.count * per_token; i += static_cast<int>(blockDim.x)) words[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < share.count * size; i += static_cast<int>(blockDim.x)) {
      const int index = i / size, place = i % size;
      const Offset word = p.offsets.id_words<kMasksRanks>(op.bank, first_source + place, share.first + index);
      if (await_word(op, peers.local<uint64_t>(word), Awaited::kPartials, first + place) == 0) continue;
      any.set(index);
      ptx::atom_or_relaxed_shared(&words[index * per_token + RankMask::word_of(place)], RankMask::bit_of(place));
    }
    return !__syncthreads_or(op.context.has_failed());
  }
};

// A token of another domain's home rank, whose rows came unweighted: the terms of its sum here. A warp calls.
__device__ __forceinline__ HomeTerm term_of_record(const CombineRole& role, const WarpContext& op,
                                                   const IncomingRecord& record, int link, int token) {
  const LlCombineParams& p = role.p;
  const LlRail& rail = *role.rail;
  HomeTerm term;
  int source = -1;
  uint32_t sent = 0, weight = 0;
  if (role.lane < p.shape.topk && token < record.tokens) {
    const int entry = token * p.shape.topk + role.lane;
    const Choice choice = Choice::of(record.ids[entry], p.shape.num_experts, role.geometry.by_local_experts);
    if (choice.rank >= 0 && rail.link_of(choice.rank) == rail.link) {
      term.rank = choice.rank;
      source = rail.first_of(link) + choice.rank - rail.first_of(rail.link);
      const Offset word = p.offsets.id_words<kMasksRanks>(op.bank, source, token);
      sent = static_cast<uint32_t>(ptx::ld_relaxed_sys(role.peers.local<uint64_t>(word)));
      weight = record.weights[entry];
    }
  }
  __syncwarp();
  term.arrange(role, op, token, source, link, sent, weight);
  return term;
}

// A slice of the sums of the ranks that the own link serves, for the home rank of `unit.link`. All threads of a block
// call. False: a wait was given up.
template <DType kIn, DType kWire, bool kUnweighted, int kCount>
__device__ __forceinline__ bool send_domain_sums(const RailRole& rail_role, const CombineRole& role,
                                                 const WarpContext& op, ShareSources& sources, const RailUnit& unit) {
  const LlCombineParams& p = role.p;
  const LlRail& rail = rail_role.rail;
  if (is_masked_link(rail_role, op, unit.link)) return true;
  const int home = rail.peer(unit.link), pieces = role.geometry.schedule.pieces;
  const Share share = Share::of(rail, min(__ldg(p.handle.tokens + home), p.shape.max_tokens), unit.channel);
  IncomingRecord record;
  if constexpr (kUnweighted) {
    const Arrival arrival = await_channel(rail_role, op, unit.link, 0, Awaited::kWeights);
    if (arrival != Arrival::kCame) return arrival == Arrival::kLeftOut;
    record = IncomingRecord::of(rail_role, op, unit.link, p.shape);
  }
  bool is_ok = sources.await(rail, op, p, role.peers, unit.link, share);
  const int staging = rail_role.bank_of_staging(op.bank, Kind::kCombine);
#pragma unroll 1
  for (int u = unit.first_piece(); is_ok && u < share.count * pieces; u += RailUnit::piece_step(rail)) {
    Unit piece = role.geometry.schedule.unit(0, u);
    const int i = piece.token;
    if (!sources.any.has(i)) continue;
    piece.token += share.first;
    const int lane_index = min(piece.piece * 32 + role.lane, p.hidden / kCount - 1);
    float total[kCount];
#pragma unroll
    for (int n = 0; n < kCount; n++) total[n] = kNothingYet;
    Numbers<kWire, kCount> sum;
    sum.fill(0);
    if constexpr (kUnweighted) {
      HomeTerm term = term_of_record(role, op, record, unit.link, piece.token);
      RankSum<kWire, kCount> rank_sum;
      rank_sum.rounded = sum;
      is_ok = add_terms<kIn>(role, op, term, piece, lane_index, rank_sum, total);
      sum = rank_sum.rounded;
    } else {
      Partials<kWire, kCount, ShareSources::Ranks> partials(role, op, sources.of(rail, i, rail.first_of(unit.link)),
                                                            piece, lane_index);
      LeanWaitBudget budget;
#pragma unroll 1
      while (is_ok && partials.has_more(role)) {
        partials.begin_batch(role);
        is_ok = partials.await(role, op, piece, budget);
        if (!rail.has_domain_sums()) sum = partials.numbers[0];
        if (is_ok) partials.add_to(role, op, piece.token, sum, total);
      }
    }
    if (rail.has_domain_sums()) round_sum(sum, total, p.hidden, piece.piece);
    const Offset row = rail.row_to(staging, unit.link, share.first + sources.any.count_before(i));
    store_of_row(sum, role.peers.local<char>(row), p.hidden, lane_index);
  }
  if (__syncthreads_or(!is_ok)) return false;
  if constexpr (kMasksFarRanks) {
    // A sum may lack weights that the home rank did not send in time. It was told before that it is masked.
    __threadfence();
    if (__syncthreads_or(is_masked_now(op, home))) return true;
  }
  post_rows(rail_role, op, unit.link, unit.channel, share.first, sources.any.count_before(share.count));
  return true;
}

// All threads of a block: the deadline passes, as it does for what is not sent. Then the buffer has failed.
static __device__ __noinline__ bool never_come(const WarpContext& op, Awaited awaited, int peer, uint64_t expected,
                                               uint64_t seen) {
  if (threadIdx.x != 0) return false;
  WaitBudget budget;
  while (!budget.is_spent(op.context, awaited, peer, expected, seen)) {
  }
  return false;
}

// A slice of the own sums for the home rank of `unit.link`, made where the rows lie. All threads of a block call.
// False: a wait was given up.
template <DType kIn, DType kWire, bool kHome, int kCount>
__device__ __forceinline__ bool send_own_sums(const RailRole& rail_role, const CombineRole& role, const WarpContext& op,
                                              ShareBits& bits, const RailUnit& unit) {
  const LlCombineParams& p = role.p;
  const LlRail& rail = rail_role.rail;
  const int home = rail.peer(unit.link), map_k = role.geometry.map_k;
  const int tokens = min(__ldg(p.handle.tokens + home), p.shape.max_tokens);
  const Share share = Share::of(rail, tokens, unit.channel);
  const int32_t* rows = p.handle.rows + static_cast<int64_t>(home * p.shape.max_tokens + share.first) * map_k;
  bits.mark(share.count, map_k, [&](int i) {
    const int32_t row = __ldg(rows + i);
    return row != kNoRow && row < role.geometry.output_rows;
  });
  IncomingRecord record;
  if constexpr (kHome) {
    if (await_channel(rail_role, op, unit.link, 0, Awaited::kWeights) != Arrival::kCame) return false;
    record = IncomingRecord::of(rail_role, op, unit.link, p.shape);
    if (record.tokens < tokens) return never_come(op, Awaited::kWeights, home, tokens, record.tokens);
  }
  const auto load_terms = [&](const Unit& piece) {
    const int token = share.first + piece.token;
    Terms terms = TermsAt::of(role, home, token).load(p.options.weighting);
    if constexpr (kHome) {
      if (terms.row >= 0) terms = with_weight(terms, record.weights[token * p.shape.topk + role.lane]);
    }
    return terms;
  };
  const int staging = rail_role.bank_of_staging(op.bank, Kind::kCombine);
  const int count = share.count * role.geometry.schedule.pieces, step = RailUnit::piece_step(rail);
  int u = unit.first_piece();
  Unit piece = role.geometry.schedule.unit(0, u);
  Terms next = u < count ? load_terms(piece) : Terms{kNoRow, 1.0f};
#pragma unroll 1
  for (; u < count; u += step) {
    const Unit now = piece;
    const Terms terms = checked(role, next, true);
    RowBatch<kIn, kCount, 4> batch;  // these blocks have the registers
    batch.load(role, terms, lane_of_rows<kIn, kCount>(role, now.piece));
    piece = role.geometry.schedule.unit(0, u + step);
    if (u + step < count) next = load_terms(piece);
    if (!bits.has(now.token)) continue;
    testing_point(Point::kBetweenRows, op, u);
    float total[kCount];
    partial_sum<kIn>(role, terms, now.piece, batch, total);
    Numbers<kWire, kCount> sum;
    round_sum(sum, total, p.hidden, now.piece);
    if (kIsBlockFormat<kWire> && rail.has_domain_sums()) {  // it is the domain's sum, too, which is rounded again
#pragma unroll
      for (int n = 0; n < kCount; n++) total[n] = kNothingYet;
      sum.add_to(total);
      round_sum(sum, total, p.hidden, now.piece);
    }
    const int lane_index = min(now.piece * 32 + role.lane, p.hidden / kCount - 1);
    const Offset row = rail.row_to(staging, unit.link, share.first + bits.count_before(now.token));
    store_of_row(sum, role.peers.local<char>(row), p.hidden, lane_index);
  }
  post_rows(rail_role, op, unit.link, unit.channel, share.first, bits.count_before(share.count));
  return true;
}

// The record of a link's home rank: its header, and the weights that sums wait for, to the ranks that the own link
// serves.
template <bool kForwardsWeights>
__device__ __forceinline__ void forward_record(const RailRole& rail_role, const CombineRole& role,
                                               const WarpContext& op, int link) {
  const LlCombineParams& p = role.p;
  const IncomingRecord record = IncomingRecord::of(rail_role, op, link, p.shape);
  const LsaPeers as_source = rail_role.as_peer_of(link);
  forward_header(op, p.offsets, as_source, record);
  const int weights = kForwardsWeights && !rail_role.rail.adds_rows ? record.tokens * p.shape.topk : 0;
  for (int i = threadIdx.x; i < weights; i += static_cast<int>(blockDim.x)) {
    const int id = record.ids[i];
    if (!p.shape.valid(id)) continue;
    const int owner = role.geometry.by_local_experts.divide(id);
    if (!reaches(as_source, owner)) continue;
    const Offset first = p.offsets.weight<kMasksRanks>(op.bank, as_source.rank, 0, 0);
    ptx::st_relaxed_sys(role.peers.at<uint64_t>(owner, first) + i, tagged(record.weights[i], op.tag));
  }
}

__device__ __forceinline__ CombineRole combine_role(const LlArgs<LlCombineParams>& args) {
  const BlockPosition nowhere{0, args.plan.blocks};
  return {{args.plan, nowhere, lane_id(), warp_id()},
          RailPart::of(args),
          args.params,
          args.geometry,
          args.peers,
          args.state};
}

// Blocks in front of the launch: the record to the links, and theirs to the ranks that the own link serves.
template <bool kHome, bool kUnweighted>
__device__ __forceinline__ void combine_front(const LlArgs<LlCombineParams>& args, int block) {
  constexpr bool kForwardsWeights = kHome && !kUnweighted;
  const LlCombineParams& p = args.params;
  EP_SHARED(OpContext, context);
  WarpContext op(context, WarpContext::NotYet{});
  const RailRole rail_role = RailRole::in_front(args, block);
  const CombineRole role = combine_role(args);
  const bool is_sender = block < rail_role.rail.send_blocks;
  const bool sends_records = is_sender && rail_role.index == 0 && sends(p.phase);
  uint32_t handle = 0;  // the first warp has it, which stores the header
  const RailOp begun(context, op, args, Kind::kCombine, receives(p.phase), is_sender, [&] {
    if (sends_records && warp_id() == 0) handle = CombineHeader::load(p.handle);
  });
  if (!begun.is_ok()) return;
  if (is_sender) {
    if (!sends_records) return;
    const auto id = [&](int i) { return __ldg(p.handle.ids + i); };
    const auto weight = [&](int i) {
      OwnHomeWeight own;
      own.load(p, i);
      return own.bits(p);
    };
    // The others want weights alone, and the ids that say whose they are.
    const CombineHeader header{*op.context.header, handle};
    return send_record(rail_role, op, header, kHome ? p.num_tokens * p.shape.topk : 0, id, weight);
  }
  if (!(kForwardsWeights ? sends(p.phase) : receives(p.phase))) return;
  forward_all(rail_role, op, rail_role.rail.others(), 1, [&](const RailUnit& unit) {
    forward_record<kForwardsWeights>(rail_role, role, op, unit.link);
    return true;
  });
}

// Blocks behind those that send partial sums, of a receive all of them: the `index`-th of them.
template <DType kIn, DType kWire, DType kOut, bool kHome, bool kUnweighted>
__device__ __forceinline__ void combine_sums(const LlArgs<LlCombineParams>& args, int index) {
  constexpr int kCount = kLaneElements<kIn, kWire, kOut>;
  EP_SHARED(OpContext, context);
  EP_SHARED(ShareSources, sources);
  WarpContext op(context, WarpContext::NotYet{});
  const RailRole rail_role{args.rail, args.peers, EP_NETWORK(args.network), index, args.rail.sum_blocks};
  const CombineRole role = combine_role(args);
  const RailOp begun(context, op, args, Kind::kCombine, true, true);
  if (!begun.is_ok()) return;
  for (int number = args.rail.record_units() + index; number < args.rail.units(); number += rail_role.step) {
    const RailUnit unit = RailUnit::of(args.rail, number);
    if (has_bug(Bug::kSkippedChunk, Kind::kCombine) && unit.channel == 1) continue;
    if constexpr (!kUnweighted && !kMasksRanks) {
      if (args.rail.adds_rows) {
        if (!send_own_sums<kIn, kWire, kHome, kCount>(rail_role, role, op, sources.any, unit)) return;
        continue;
      }
    }
    if (!send_domain_sums<kIn, kWire, kUnweighted, kCount>(rail_role, role, op, sources, unit)) return;
  }
}

// ---- At home

// Rows of tokens in [from, to) that come by a link. A warp calls.
__device__ __forceinline__ int count_rows_from(const CombineRole& role, int link, int from, int to) {
  const auto experts = ExpertsOfLink::of(*role.rail, link, role.geometry.by_local_experts);
  const int topk = role.p.shape.topk;
  int count = 0;
#pragma unroll 1
  for (int token = from; token < to; token += 32) {
    const int ids_of_lane = token + role.lane < to ? topk : 0;
    const int32_t* ids = role.p.handle.ids + (token + role.lane) * topk;
    bool comes = false;
#pragma unroll 4
    for (int k = 0; k < ids_of_lane; k++) comes |= experts.has(__ldg(ids + k));
    count += __popc(__ballot_sync(~0u, comes));
  }
  return count;
}

// Adds up what the own domain's ranks have of a piece, in their order. False: a wait was given up.
template <DType kIn, bool kUnweighted, DType kWire, int kCount>
__device__ __forceinline__ bool add_own_domain(const CombineRole& role, const WarpContext& op, const Choice& inside,
                                               const Unit& unit, int lane_index, const Numbers<kWire, kCount>& own,
                                               float (&total)[kCount]) {
  if constexpr (kUnweighted) return add_at_home<kIn, kWire>(role, op, inside, unit, lane_index, total);
  Partials<kWire, kCount> partials(role, op, LaneRanks::of(inside.rank), unit, lane_index);
  LeanWaitBudget budget;
#pragma unroll 1
  while (partials.has_more(role)) {
    partials.begin_batch(role);
    if (!partials.await(role, op, unit, budget)) return false;
    partials.add_to(role, op, unit.token, own, total);
  }
  return true;
}

// The piece of an own token that has come by a link. False: it has not, and the wait is over.
template <DType kWire, int kCount>
__device__ __forceinline__ bool load_from_link(const CombineRole& role, const WarpContext& op, int link,
                                               const Unit& unit, int lane_index, Numbers<kWire, kCount>& sum) {
  const LlRail& rail = *role.rail;
  const int num_tokens = role.p.num_tokens, channel = Share::channel_of(rail, num_tokens, unit.token);
  const int first = Share::of(rail, num_tokens, channel).first;
  const Offset row = rail.row_from(op.bank, link, first + count_rows_from(role, link, first, unit.token));
  if (!await_channel_of_warp(role, op, link, channel)) return false;
  load_of_row(sum, role.peers.local<char>(row), role.p.hidden, lane_index);
  return true;
}

// A warp's wait is over: the buffer has failed, or else a rank is masked.
__device__ __forceinline__ bool has_failed(const WarpContext& op) {
  return !kMasksRanks || __any_sync(~0u, op.context.has_failed());
}

// Adds a piece of all domains that have a sum of the token, in order. A domain's sum is its ranks' in their order,
// rounded once: here, but where a link brings it.
template <DType kIn, bool kUnweighted, DType kWire, int kCount>
__device__ bool add_domains(const CombineRole& role, const WarpContext& op, const Choice& choice, const Unit& unit,
                            int lane_index, const Numbers<kWire, kCount>& own, float (&total)[kCount]) {
  const LlRail& rail = *role.rail;
#pragma unroll 1
  for (int domain = 0; domain < rail.num_domains; domain++) {
    Choice inside = choice;
    if (static_cast<unsigned>(choice.rank - domain * rail.domain_size) >= static_cast<unsigned>(rail.domain_size)) {
      inside.rank = -1;
    }
    if (!__any_sync(~0u, inside.rank >= 0)) continue;
    Numbers<kWire, kCount> sum;
    const bool is_own = domain == rail.domain;
    if (!is_own && rail.has_domain_sums()) {
      if (load_from_link(role, op, domain, unit, lane_index, sum)) {
        sum.add_to(total);
      } else if (has_failed(op)) {
        return false;
      }
      continue;
    }
    float domain_total[kCount];
#pragma unroll
    for (int n = 0; n < kCount; n++) domain_total[n] = kNothingYet;
    if (is_own && !add_own_domain<kIn, kUnweighted>(role, op, inside, unit, lane_index, own, domain_total)) {
      return false;
    }
#pragma unroll 1
    for (LaneRanks links = LaneRanks::of(is_own ? -1 : inside.rank); links.has_more(role.p.shape.num_ranks);) {
      if (load_from_link(role, op, links.take(), unit, lane_index, sum)) {  // each of one rank
        sum.add_to(domain_total);
      } else if (has_failed(op)) {
        return false;
      }
    }
    round_sum(sum, domain_total, role.p.hidden, unit.piece);
    sum.add_to(total);
  }
  return true;
}

}  // namespace EP_KERNELS
}  // namespace ep
