// Low-latency dispatch: the kernel's table of contents is dispatch(), at the end.
//
// Rows travel in band: a slot of the receiver's window for each (source, token), full of kAbsent until words arrive.
// Where there is much to send, some blocks only send and the others only receive: a full queue of remote stores would
// hold up the loads of its SM.
#pragma once

#include "cuda/dispatch_info.cuh"
#include "cuda/launch.h"
#include "cuda/payload.cuh"
#include "cuda/stamps.cuh"

namespace ep {

struct DispatchRole : WarpRole {
  const LlDispatchParams& p;
  const LlDispatchGeometry& geometry;
  const LsaPeers& peers;

  __device__ int sender() const { return warp * plan.sender_blocks + at.block; }
  __device__ int receiver() const {
    const int index = warp - plan.receiver_warp0 - geometry.listeners;
    return (index < 0 ? index + plan.receiver_warps : index) * plan.receiver_blocks() + at.block - plan.receiver_block0;
  }
  // The first own token whose routing this warp sends; the control warp comes last.
  __device__ int routing_token() const {
    const int turn = warp == plan.warps - 1 ? plan.warps - 1 : plan.warps - 2 - warp;
    return turn * plan.sender_blocks + at.block;
  }
  __device__ int routing_step() const { return plan.sender_blocks * plan.warps; }
  __device__ int receiving_thread() const { return threadIdx.x - plan.receiver_warp0 * 32; }
  __device__ int receiving_threads() const { return plan.receiver_warps * 32; }
  // All of them but the opener, which has other things to do first.
  __device__ int clearing_threads() const {
    return receiving_threads() - (plan.receiver_warp0 + plan.receiver_warps == plan.warps ? 32 : 0);
  }
  // Own rows of a whole operation never enter the window; a staged one sends them to itself.
  __device__ bool sends_to_itself() const { return p.half == Half::kSend; }
};

// ---- Sending

// Expert id `lane` of an own token, as the caller gave it. Lanes past the last choice ask for that one.
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
  // Between load() and prepare(), as it needs nothing that was asked for.
  __device__ __forceinline__ void aim(const DispatchRole& role) {
    if (token >= role.p.num_tokens) return;
    lane = RoutingLane::aimed(role.p.layout, role.peers, role.geometry.by_id_words, 0, token);
  }
  __device__ __forceinline__ void prepare(const DispatchRole& role) {
    if (token >= role.p.num_tokens) return;
    choice = choice_of(role, id);
    lane.fill(role.p.layout, role.peers, 0, choice, weight);
  }
};

__device__ __forceinline__ void send_token_routing(const DispatchRole& role, const CallContext& call,
                                                   const OutgoingRouting& out) {
  const LlDispatchParams& p = role.p;
  if (out.token >= p.num_tokens) return;
  testing_point(Point::kBeforeRouting, call, out.token);
  out.lane.send(call, p.layout);
  send_routing(call, p.layout, role.peers, role.geometry.by_id_words, 1, out.token, out.choice, out.weight);
  if (role.lane >= p.shape.topk) return;
  p.handle.ids[out.token * p.shape.topk + role.lane] =
      out.choice.rank < 0 ? -1 : out.choice.rank * p.output.local_experts + out.choice.expert;
  if (out.choice.rank < 0) report_invalid_id(p, call.state, out.token);
}

// Token `first` and those that this warp sends after it: there are more tokens than warps.
static __device__ __noinline__ void send_further_routing(const DispatchRole role, const CallContext& call, int first) {
  OutgoingRouting out;
#pragma unroll 1
  for (int token = first; token < role.p.num_tokens; token += role.routing_step()) {
    out.load(role, token);
    out.aim(role);
    out.prepare(role);
    send_token_routing(role, call, out);
    __syncwarp();
  }
}

// Tokens go to the warps of the sending blocks, from the last warp on: the first have rows to send. Blocks that send
// have the lowest numbers and wait for nobody but in block 0, so that blocks need not be resident together.
__device__ __forceinline__ void send_all_routing(const DispatchRole& role, const CallContext& call,
                                                 const OutgoingRouting& out) {
  testing_point(Point::kBeforeRouting, call);
  send_token_routing(role, call, out);
  const int next = out.token + role.routing_step();
  __syncwarp();
  if (next < role.p.num_tokens) send_further_routing(role, call, next);
}

// A piece of an own row, ready to be sent as soon as the epoch is known.
template <Payload kPayload, DType kType, int kSteps>
struct Outgoing {
  int asked;  // unit
  RawId id;
  Raw<kPayload, kSteps> raw;
  int index;          // of the piece in its row; -1: nothing left to send
  Offset slot;        // in bank 0: where the lane's words begin
  uint32_t turns[2];  // ranks that it goes to: bit i is the i-th after this one
  PieceOf<kPayload, kSteps> piece;

  __device__ __forceinline__ void load(const DispatchRole& role, int next) {
    asked = next;
    if (asked >= role.geometry.send_units) return;
    const int token = role.geometry.by_pieces.divide(asked);
    id = own_id(role, token);
    raw.load(role.p, role.geometry, token, role.geometry.by_pieces.remainder(asked, token), role.lane);
  }
  // What was asked for is the next to be sent.
  __device__ __forceinline__ void prepare(const DispatchRole& role) {
    index = -1;
    if (asked >= role.geometry.send_units) return;
    const int token = role.geometry.by_pieces.divide(asked);
    index = role.geometry.by_pieces.remainder(asked, token);
    const int rank = role.peers.rank, num_ranks = role.p.shape.num_ranks;
    slot = role.p.layout.row(0, rank, token) + lane_offset<kSteps>(index, role.lane);
    const Choice choice = choice_of(role, id);
    const bool wanted = choice.rank >= 0 && (choice.rank != rank || role.sends_to_itself());
    const int turn = choice.rank - rank - 1 + (choice.rank <= rank ? num_ranks : 0);
    turns[0] = __reduce_or_sync(~0u, wanted && turn < 32 ? 1u << turn : 0);
    turns[1] = num_ranks > 32 ? __reduce_or_sync(~0u, wanted && turn >= 32 ? 1u << (turn - 32) : 0) : 0;
    encode<kPayload, kType, kSteps>(role.p, raw, index, piece, role.lane);
  }
};

// Row pieces by 16-byte stores, to the ranks after this one first.
template <Payload kPayload, DType kType, int kSteps>
__device__ __forceinline__ void send_piece(const DispatchRole& role, const CallContext& call,
                                           Outgoing<kPayload, kType, kSteps>& out) {
  testing_point(Point::kBetweenRows, call, out.asked);
  char* const at_rank0 = role.peers.base + out.slot + call.bank * role.p.layout.row_bank_bytes;
  out.load(role, out.asked + role.plan.senders());  // before the stores: it would wait behind them
  uint32_t turns = out.turns[0], others = out.turns[1];
  int first = role.peers.rank + 1;
#pragma unroll 1
  while ((turns | others) != 0) {
    if (turns == 0) {
      turns = others;
      others = 0;
      first += 32;
    }
    int peer = first + __ffs(static_cast<int>(turns)) - 1;
    if (peer >= role.p.shape.num_ranks) peer -= role.p.shape.num_ranks;
    turns &= turns - 1;
    store_wire<RemoteStore>(at_rank0 + static_cast<uint32_t>(peer) * role.peers.stride, role.geometry.row, out.index,
                            out.piece, role.lane);
  }
}

// What a warp sends first has been asked for, and is made ready while the epoch is on its way. begin() waits for it;
// false: nothing may be sent.
template <Payload kPayload, DType kType, int kSteps, class Begin>
__device__ __forceinline__ bool send_all(const DispatchRole& role, const CallContext& call, OutgoingRouting& routing,
                                         Outgoing<kPayload, kType, kSteps>& out, const Begin& begin) {
  routing.prepare(role);
  out.prepare(role);
  if (!begin()) return false;
  send_all_routing(role, call, routing);
  testing_point(Point::kBeforeRows, call);
#pragma unroll 1
  while (out.index >= 0) {
    send_piece(role, call, out);
    out.prepare(role);
  }
  return true;
}

// ---- Receiving

// Where the weight of choice `lane` of a row arrives, and what the lane has seen there.
struct IncomingWeight {
  const uint64_t* word;  // in bank 0 until the row has been asked for
  uint64_t seen;
};

// A row's numbers: the handle's map and weights, and what the layout tells of the row. Once for each slot.
template <bool kExpertRows>
__device__ __forceinline__ void store_row_info(const DispatchRole& role, const CallContext& call, int source, int token,
                                               bool wanted, uint32_t expert, int32_t row, const IncomingWeight& given) {
  const LlDispatchParams& p = role.p;
  const int slot = source * p.shape.max_tokens + token, lane = role.lane, topk = p.shape.topk;
  const int map_k = kExpertRows ? topk : 1;
  const unsigned any = __ballot_sync(~0u, wanted);
  const int32_t token_row = kExpertRows || any == 0 ? row : __shfl_sync(~0u, row, __ffs(any) - 1);
  if (lane < map_k) p.handle.rows[static_cast<int64_t>(slot) * map_k + lane] = token_row;
  float weight = 0;
  if (wanted && is_tagged(given.seen, call.tag)) {
    weight = __uint_as_float(static_cast<uint32_t>(given.seen));
  } else if (wanted) {
    weight = __uint_as_float(await_word(call, given.word, Phase::kWeights, source));
  }
  if constexpr (kExpertRows) {
    if (!wanted) return;
    p.handle.weights[static_cast<int64_t>(slot) * map_k + lane] = weight;
    if (row < 0) return;
    p.out_weights[row] = weight;
    if (p.src_info != nullptr) p.src_info[row] = token;
    if (p.row_expert != nullptr) p.row_expert[row] = static_cast<int>(expert);
    return;
  }
  if (token_row < 0 || any == 0 || lane >= topk) return;
  const int64_t entry = static_cast<int64_t>(token_row) * topk + lane;
  p.out_weights[entry] = weight;
  store_id(p.out_topk_idx, p.is_idx64, entry, wanted ? static_cast<int>(expert) : -1);
}

// A piece to place: the own rank's come first, then the others' in turn, so that no source waits for another.
struct ReceiveUnit {
  int source, token, piece;

  __device__ __forceinline__ static ReceiveUnit of(const DispatchRole& role, int unit) {
    const LlDispatchGeometry& g = role.geometry;
    ReceiveUnit result{role.peers.rank, 0, 0};
    int rest = unit;
    if (unit >= g.own_units) {
      const int turn = g.by_others.divide(unit - g.own_units);
      result.source -= 1 + g.by_others.remainder(unit - g.own_units, turn);
      if (result.source < 0) result.source += role.p.shape.num_ranks;
      rest = turn;
    }
    result.token = g.by_receive_pieces.divide(rest);
    result.piece = g.by_receive_pieces.remainder(rest, result.token);
    return result;
  }
};

// A piece on its way to its places: asked for before it is known whether it comes, looked at afterwards.
template <Payload kPayload, int kSteps>
struct Incoming {
  ReceiveUnit unit;
  ptx::SharedAddress tokens_at, id_at;  // in Places: tokens of the source, id of choice `lane`
  int id_shift;
  uint32_t id_mask;
  bool is_own;   // lies in x; a row of another rank, or of a staged call, lies in the window
  char* staged;  // in bank 0 until ask()
  Raw<kPayload, kSteps> raw;
  PieceOf<kPayload, kSteps> piece;
  IncomingWeight weight;

  // All that does not need the epoch: where piece `number` will lie; an own row is asked for.
  __device__ __forceinline__ void aim(const DispatchRole& role, const Places& places, int number) {
    const LlDispatchParams& p = role.p;
    unit = ReceiveUnit::of(role, number);
    const int slot = unit.source * p.shape.max_tokens + unit.token, k = min(role.lane, p.shape.topk - 1);
    const bool is_byte = p.layout.ids.bits == 8;
    const int word = PlacesShape::kIdsAt + slot * p.layout.ids.words() + (is_byte ? k >> 2 : k >> 1);
    tokens_at = ptx::opaque(places.address + (places.shape.tokens_at + unit.source) * 4);
    id_at = ptx::opaque(places.address + word * 4);
    id_shift = is_byte ? (k & 3) * 8 : (k & 1) * 16;
    id_mask = ptx::opaque(p.layout.ids.none());
    is_own = unit.source == role.peers.rank && sends(p.half);
    staged = ptx::opaque(role.peers.local<char>(p.layout.row(0, unit.source, unit.token)) +
                         lane_offset<kSteps>(unit.piece, role.lane));
    weight = {ptx::opaque(role.peers.local<uint64_t>(p.layout.weight(0, unit.source, unit.token, role.lane))), 0};
    if (is_own) raw.load(p, role.geometry, unit.token, unit.piece, role.lane);
  }
  __device__ __forceinline__ void ask(const DispatchRole& role, const CallContext& call) {
    const LlLayout& layout = role.p.layout;
    const int bank = call.bank;
    staged += bank * static_cast<int64_t>(layout.row_bank_bytes);
    weight.word += bank * static_cast<int64_t>(layout.tagged_bank_bytes / sizeof(uint64_t));
    if (needs_weight(role)) weight.seen = ptx::ld_relaxed_sys(weight.word);
    if (!is_own) load_wire(staged, role.geometry.row, unit.piece, piece, role.lane);
  }

  __device__ __forceinline__ bool needs_weight(const DispatchRole& role) const {
    return unit.piece == role.geometry.numbers_piece && role.lane < role.p.shape.topk;
  }
  // What had not come when it was asked for: again, before anybody looks at it.
  __device__ __forceinline__ void ask_again(const DispatchRole& role, const CallContext& call) {
    if (needs_weight(role) && !is_tagged(weight.seen, call.tag)) weight.seen = ptx::ld_relaxed_sys(weight.word);
    if (!is_own && !has_arrived(piece)) load_wire(staged, role.geometry.row, unit.piece, piece, role.lane);
  }

  // The row has arrived, and its place on the wire is free again. False: the wait was given up.
  template <DType kType>
  __device__ __forceinline__ bool take(const DispatchRole& role, const CallContext& call) {
    if (is_own) {
      encode<kPayload, kType, kSteps>(role.p, raw, unit.piece, piece, role.lane);
    } else {
      Patience patience;
      while (!has_arrived(piece)) {
        if (has_bug(Bug::kTornRows, call.kind) && __all_sync(~0u, has_arrived(piece.chunk[0]))) break;
        if (__any_sync(~0u, patience.is_over(call, Phase::kRows, unit.source, unit.token, unit.piece))) return false;
        load_wire(staged, role.geometry.row, unit.piece, piece, role.lane);
      }
      testing_point(Point::kBeforeReset, call, unit.source * role.p.shape.max_tokens + unit.token);
      if (!has_bug(Bug::kSkippedReset, call.kind) || unit.token != 0) {
        reset_wire<kSteps, kPayload != Payload::kFloat>(staged, role.geometry.row, unit.piece, role.lane);
      }
    }
    decode<kPayload, kSteps>(piece);
    return true;
  }
};

// Places piece `number`, which `in` has asked for. False: it was the warp's last, or a wait was given up.
template <Payload kPayload, DType kType, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ bool place_piece(const DispatchRole& role, const CallContext& call, const Places& places,
                                            Incoming<kPayload, kSteps>& in, int number) {
  const LlDispatchParams& p = role.p;
  const ReceiveUnit unit = in.unit;
  uint32_t tokens, ids;
  ptx::ld_shared(in.tokens_at, tokens);
  ptx::ld_shared(in.id_at, ids);
  const bool has_duplicates = places.has_duplicates(), exists = unit.token < static_cast<int>(tokens);
  if (!exists && number >= role.geometry.own_units && unit.token >= places.most_tokens()) return false;
  const uint32_t id = ids >> in.id_shift & in.id_mask;
  const uint32_t expert = exists && role.lane < p.shape.topk ? id : ~0u;
  const bool wanted = expert < static_cast<uint32_t>(p.output.local_experts);
  const int slot = unit.source * p.shape.max_tokens + unit.token;
  const int32_t row = row_of<kLayout>(p, places, unit.source, slot, has_duplicates, wanted, expert);
  if (exists && unit.piece == role.geometry.numbers_piece) {
    store_row_info<has_expert_rows(kLayout)>(role, call, unit.source, unit.token, wanted, expert, row, in.weight);
  }
  if (!__any_sync(~0u, wanted)) return true;
  const RowWriter<kPayload, kSteps> writer(p, role.geometry, unit.piece, role.lane);
  if (!in.template take<kType>(role, call)) return false;
  unsigned targets = __ballot_sync(~0u, row >= 0);
  if constexpr (!has_expert_rows(kLayout)) targets &= -targets;  // one row for all choices
#pragma unroll 1
  for (; targets != 0; targets &= targets - 1) {
    const int k = __ffs(targets) - 1;
    writer.store(p, __shfl_sync(~0u, row, k), __shfl_sync(~0u, expert, k), in.piece);
  }
  if (in.is_own) stamp(Stamp::kOwnDone, role.peers.rank);
  return true;
}

// ---- Table of contents of a receiver

// The buffer has failed: nothing was received. The block that would write the info tensor says so: others may still
// have seen the buffer well.
template <bool kExpertRows>
static __device__ __noinline__ void store_nothing(const DispatchRole role) {
  const LlDispatchParams& p = role.p;
  if (!receives(p.half)) return;
  const int64_t thread = role.at.block * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(role.at.num_blocks) * blockDim.x;
  for (int64_t row = thread; row < p.output.rows(); row += threads) clear_entry(p, kExpertRows, row);
  if (role.at.block != role.at.num_blocks - 1) return;
  const int ranges = p.layout_range != nullptr ? p.output.bins() * p.shape.num_ranks : 0;
  for (int i = threadIdx.x; i < p.output.info_size(); i += blockDim.x) p.info[i] = 0;
  for (int i = threadIdx.x; i < p.shape.num_ranks; i += blockDim.x) p.handle.tokens[i] = 0;
  for (int i = threadIdx.x; i < ranges; i += blockDim.x) p.layout_range[i] = 0;
}

constexpr int kLoneInfoBins = 64;  // up to so many, one warp writes the info tensor; of more, each has 32

// `in`: the warp's first piece, if it has any. is_aimed: already.
template <Payload kPayload, DType kType, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ void receive(const DispatchRole& role, const CallContext& call, const Places& places,
                                        Incoming<kPayload, kSteps>& in, bool is_aimed) {
  constexpr bool kIsPacked = kLayout == OutputLayout::kPacked;
  const LlDispatchParams& p = role.p;
  const int threads = ptx::opaque(role.receiving_threads());
  testing_point(Point::kBeforeReceive, call);
  ptx::named_barrier(1, threads);  // clear() is over
  // The last warps have the fewest rows to move: they clear gaps, and those of the last block write the info tensor.
  const int from_last = role.plan.receivers() - 1 - role.receiver(), bins = p.output.bins();
  const int last_in_block = role.plan.receiver_warp0 + role.plan.receiver_warps - 1 - role.warp;
  const int info_warps = bins <= kLoneInfoBins ? 1 : min(ceil_div(bins, 32), role.plan.receiver_warps);
  const bool is_last_block = role.at.block == role.at.num_blocks - 1;
  const bool stores_info = is_last_block && last_in_block < info_warps;
  const bool stores_rest = is_last_block && last_in_block == min(info_warps, role.plan.receiver_warps - 1);
  int number = ptx::opaque(role.receiver());
  const bool has_duties = ptx::opaque(stores_info || stores_rest || from_last < role.geometry.gap_warps);
  const StartFinder starts(places, role.geometry.by_alignment, kIsPacked && last_in_block == 0);
  build_places<has_expert_rows(kLayout)>(p, role.peers, call, places, role.geometry.by_max_tokens,
                                         role.receiving_thread(), threads);
  if (number < role.geometry.receive_units) {
    if (!is_aimed) in.aim(role, places, number);
    in.ask(role, call);
  }
  if constexpr (kIsPacked) {
    ptx::named_barrier(1, threads);
    starts.find(p, places);
  }
  // The barrier stands in both branches: who has no duties has jumped over them, and has fetched what follows, while
  // it waits.
  if (!has_duties) {
    ptx::named_barrier(1, threads);
  } else {
    ptx::named_barrier(1, threads);
    if (stores_info) store_info<kLayout>(p, call, places, last_in_block, info_warps);
    if (stores_rest) store_rest_of_info<kLayout>(p, places);
    clear_gaps<kLayout>(p, places, from_last, role.plan.receivers());
  }
  stamp(Stamp::kRoutingKnown, role.peers.rank);
  if (number >= role.geometry.receive_units) return;
  in.ask_again(role, call);
#pragma unroll 1
  while (place_piece<kPayload, kType, kSteps, kLayout>(role, call, places, in, number)) {
    number += role.plan.receivers();
    if (number >= role.geometry.receive_units) return;
    in.aim(role, places, number);
    in.ask(role, call);
  }
}

// ---- Table of contents

template <Payload kPayload, DType kType, int kSteps, OutputLayout kLayout>
__device__ __forceinline__ void dispatch(const KernelArgs<LlDispatchParams>& args, BlockPosition at, char* shared) {
  const LlDispatchParams& p = args.params;
  const LlPlan& plan = args.plan;
  const LsaPeers& peers = args.peers;
  EP_SHARED(CallContext, call);
  const DispatchRole role{{plan, at, lane_id(), warp_id()}, p, args.geometry, peers};
  const Places places(shared, args.geometry.places);
  stamp(Stamp::kStart, peers.rank);
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();

  // What a warp sends first is on its way, and is made ready, while the epoch is.
  const bool is_sending = sends(p.half) && at.block < plan.sender_blocks;
  Outgoing<kPayload, kType, kSteps> out;
  OutgoingRouting routing;
  out.asked = args.geometry.send_units;
  routing.token = is_sending ? role.routing_token() : p.num_tokens;
  const Opening opening = open_call(call, args, Kind::kDispatch, [&] {
    if (!is_sending) return;
    routing.load(role, routing.token);
    if (role.is_sender()) out.load(role, role.sender());
    routing.aim(role);
  });
  RecordLane record;
  if (role.is_control()) record = RecordLane::of(p.call, p.layout, peers, role.lane);
  const bool is_receiver = receives(p.half) && role.is_receiver();
  if (is_receiver && !is_opener()) places.clear(role.receiving_thread(), role.clearing_threads());
  const auto begin = [&] {
    const bool is_well = begin_call(call, args, opening);
    stamp(Stamp::kEpochKnown, peers.rank);
    return is_well;
  };
  Incoming<kPayload, kSteps> in;
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

}  // namespace ep
