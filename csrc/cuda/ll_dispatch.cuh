// Low-latency dispatch: the kernel's table of contents is dispatch(), at the end.
//
// Rows travel in band: a slot of the receiver's window for each (source, token), full of kAbsent until words arrive.
// Where there is much to send, some blocks only send and the others only receive: a full queue of remote stores would
// hold up the loads of its SM.
#pragma once

#include "cuda/payload.cuh"
#include "cuda/places.cuh"
#include "cuda/stamps.cuh"

namespace ep {

struct DispatchRole : WarpRole {
  const LlDispatchParams& p;
  const LsaPeers& peers;

  __device__ int sender() const { return warp * plan.sender_blocks + at.block; }
  __device__ int receiver() const {
    return (warp - plan.receiver_warp0) * plan.receiver_blocks() + at.block - plan.receiver_block0;
  }
  // The first own token whose routing this warp sends; the control warp comes last.
  __device__ int routing_token() const {
    const int turn = warp == plan.warps - 1 ? plan.warps - 1 : plan.warps - 2 - warp;
    return turn * plan.sender_blocks + at.block;
  }
  __device__ int receiving_thread() const { return threadIdx.x - plan.receiver_warp0 * 32; }
  __device__ int receiving_threads() const { return plan.receiver_warps * 32; }
  // Own rows of a whole operation never enter the window; a staged one sends them to itself.
  __device__ bool sends_to_itself() const { return p.half == Half::kSend; }
};

// ---- Sending

// Expert id `lane` of an own token, as the caller gave it.
__device__ __forceinline__ int64_t own_id(const DispatchRole& role, int token) {
  const LlDispatchParams& p = role.p;
  if (role.lane >= p.shape.topk) return -1;
  return load_id(p.topk_idx, p.is_idx64, static_cast<int64_t>(token) * p.shape.topk + role.lane);
}

__device__ __forceinline__ Choice choice_of(const DispatchRole& role, int64_t id) {
  return Choice::of(id, role.p.shape.num_experts, role.p.output.local_experts);
}

static __device__ __noinline__ void report_invalid_id(const LlDispatchParams& p, DeviceState* state, int token) {
  const int k = lane_id();
  const int64_t id = load_id(p.topk_idx, p.is_idx64, static_cast<int64_t>(token) * p.shape.topk + k);
  if (id == -1) return;
  InvalidIds& invalid = state->found.invalid_ids;
  if (atomicAdd(reinterpret_cast<unsigned long long*>(&invalid.count), 1ull) == 0) {
    invalid.value = id;
    invalid.token = token;
    invalid.k = k;
  }
}

__device__ __forceinline__ float own_weight(const DispatchRole& role, int token) {
  const LlDispatchParams& p = role.p;
  if (p.topk_weights == nullptr || role.lane >= p.shape.topk) return 1.0f;
  return __ldg(p.topk_weights + token * p.shape.topk + role.lane);
}

// Tokens go to the warps of the sending blocks, from the last warp on: the first have rows to send. Blocks that send
// have the lowest numbers and wait for nobody but in block 0, so that blocks need not be resident together.
__device__ __forceinline__ void send_all_routing(const DispatchRole& role, const CallContext& call, int64_t first_id,
                                                 float first_weight) {
  const LlDispatchParams& p = role.p;
  const int step = role.plan.sender_blocks * role.plan.warps;
  const int first = role.routing_token();
#pragma unroll 1
  for (int token = first; token < p.num_tokens; token += step) {
    const Choice choice = choice_of(role, token == first ? first_id : own_id(role, token));
    const float weight = token == first ? first_weight : own_weight(role, token);
    send_routing(call, p.layout, role.peers, token, choice, weight);
    if (role.lane >= p.shape.topk) continue;
    p.handle.ids[token * p.shape.topk + role.lane] =
        choice.rank < 0 ? -1 : choice.rank * p.output.local_experts + choice.expert;
    if (choice.rank < 0) report_invalid_id(p, call.state, token);
  }
}

// Row pieces by 16-byte stores.
template <Payload kPayload, DType kType, int kSteps>
__device__ __forceinline__ void send_rows(const DispatchRole& role, const CallContext& call, const RowShape& row,
                                          Raw<kPayload, kSteps>& raw, int64_t first_id) {
  const LlDispatchParams& p = role.p;
  const int pieces = ceil_div(row.steps, kSteps);
  const int units = p.num_tokens * pieces;
  const int first = role.sender();
#pragma unroll 1
  for (int unit = first; unit < units; unit += role.plan.senders()) {
    const int token = unit / pieces, piece_index = unit % pieces;
    int64_t id = first_id;
    if (unit != first) {
      raw.load(p, row, token, piece_index, role.lane);
      id = own_id(role, token);
    }
    const uint64_t mask = destinations(p.shape.num_ranks, choice_of(role, id));
    Piece<kSteps> piece;
    encode<kPayload, kType, kSteps>(p, raw, piece_index, piece, role.lane);
    int peer = role.peers.rank;
#pragma unroll 1
    for (int hop = 0; hop < p.shape.num_ranks; hop++, peer = peer + 1 == p.shape.num_ranks ? 0 : peer + 1) {
      if ((mask >> peer & 1) == 0 || (hop == 0 && !role.sends_to_itself())) continue;
      store_wire<RemoteStore>(role.peers.at<char>(peer, p.layout.row(call.bank, role.peers.rank, token)), row,
                              piece_index, piece, role.lane);
    }
  }
}

// ---- Receiving

// A row's numbers: the handle's map and weights, and what the layout tells of the row. Once for each slot.
// `weight_word`: what the lane saw of its weight when it asked for the row.
__device__ __forceinline__ void store_row_info(const DispatchRole& role, const CallContext& call, int source, int token,
                                               bool wanted, uint32_t expert, int32_t row, uint64_t weight_word) {
  const LlDispatchParams& p = role.p;
  const int slot = source * p.shape.max_tokens + token, lane = role.lane, topk = p.shape.topk;
  const bool expert_rows = has_expert_rows(p.output.layout);
  const int map_k = p.output.map_k();
  const unsigned any = __ballot_sync(~0u, wanted);
  const int32_t token_row = expert_rows || any == 0 ? row : __shfl_sync(~0u, row, __ffs(any) - 1);
  if (lane < map_k) p.handle.rows[static_cast<int64_t>(slot) * map_k + lane] = expert_rows ? row : token_row;
  float weight = 0;
  if (wanted && is_tagged(weight_word, call.tag)) {
    weight = __uint_as_float(static_cast<uint32_t>(weight_word));
  } else if (wanted) {
    const auto* word = role.peers.local<uint64_t>(p.layout.weight(call.bank, source, token, lane));
    weight = __uint_as_float(await_word(call, word, Phase::kWeights, source));
  }
  if (expert_rows) {
    if (!wanted) return;
    p.handle.weights[static_cast<int64_t>(slot) * map_k + lane] = weight;
    if (row < 0) return;
    p.out_weights[row] = weight;
    if (p.row_expert != nullptr) p.row_expert[row] = static_cast<int>(expert);
    return;
  }
  if (token_row < 0 || any == 0 || lane >= topk) return;
  const int64_t entry = static_cast<int64_t>(token_row) * topk + lane;
  p.out_weights[entry] = weight;
  const int id = wanted ? static_cast<int>(expert) : -1;
  if (p.is_idx64) {
    static_cast<int64_t*>(p.out_topk_idx)[entry] = id;
  } else {
    static_cast<int32_t*>(p.out_topk_idx)[entry] = id;
  }
}

// Units are (slot, piece): the own rank's first, then the others' in turn, so that no source waits for another.
struct ReceiveUnit {
  int source, token, piece;

  __device__ static ReceiveUnit of(int unit, int own_units, int pieces, int rank, int num_ranks) {
    if (unit < own_units) return {rank, unit / pieces, unit % pieces};
    const int remote = unit - own_units, others = num_ranks - 1;
    int source = rank - 1 - remote % others;
    if (source < 0) source += num_ranks;
    const int rest = remote / others;
    return {source, rest / pieces, rest % pieces};
  }
};

template <Payload kPayload, DType kType, int kSteps>
__device__ __forceinline__ void receive_rows(const DispatchRole& role, const CallContext& call, const RowShape& row,
                                             const Places& places) {
  const LlDispatchParams& p = role.p;
  const int pieces = ceil_div(row.steps, kSteps), rank = role.peers.rank, num_ranks = p.shape.num_ranks;
  int most_tokens = 0;
#pragma unroll 1
  for (int r = 0; r < num_ranks; r++) most_tokens = max(most_tokens, places.tokens[r]);
  const int own_units = places.tokens[rank] * pieces;
  const int units = own_units + most_tokens * pieces * (num_ranks - 1);
#pragma unroll 1
  for (int u = role.receiver(); u < units; u += role.plan.receivers()) {
    const ReceiveUnit unit = ReceiveUnit::of(u, own_units, pieces, rank, num_ranks);
    if (unit.token >= places.tokens[unit.source]) continue;
    const int slot = unit.source * p.shape.max_tokens + unit.token;
    const uint32_t expert = role.lane < p.shape.topk ? places.id(p.layout.ids, slot, role.lane) : ~0u;
    const bool wanted = expert < static_cast<uint32_t>(p.output.local_experts);
    const bool is_here = __any_sync(~0u, wanted);
    const bool is_own = unit.source == rank && sends(p.half);
    char* staged = role.peers.local<char>(p.layout.row(call.bank, unit.source, unit.token));
    Piece<kSteps> piece;
    Raw<kPayload, kSteps> raw;
    uint64_t weight_word = 0;
    if (unit.piece == 0 && wanted) {
      weight_word = ptx::ld_relaxed_sys(
          role.peers.local<uint64_t>(p.layout.weight(call.bank, unit.source, unit.token, role.lane)));
    }
    if (is_here && is_own) raw.load(p, row, unit.token, unit.piece, role.lane);
    if (is_here && !is_own) load_wire(staged, row, unit.piece, piece, role.lane);  // perhaps it is there already
    const int32_t my_row = row_of(p, places, unit.source, slot, wanted, expert);
    if (!is_here) {
      if (unit.piece == 0) {
        store_row_info(role, call, unit.source, unit.token, wanted, expert, my_row, weight_word);
      }
      continue;
    }
    if (is_own) {
      encode<kPayload, kType, kSteps>(p, raw, unit.piece, piece, role.lane);
    } else {
      Patience patience;
      while (!has_arrived(piece)) {
        if (__any_sync(~0u, patience.is_over(call, Phase::kRows, unit.source, unit.token, unit.piece))) return;
        load_wire(staged, row, unit.piece, piece, role.lane);
      }
      reset_wire<kSteps>(staged, row, unit.piece, role.lane);
    }
    decode<kPayload>(piece);
    unsigned targets = __ballot_sync(~0u, my_row >= 0);
    if (!has_expert_rows(p.output.layout)) targets &= -targets;  // one row for all choices
#pragma unroll 1
    for (; targets != 0; targets &= targets - 1) {
      const int32_t out_row = __shfl_sync(~0u, my_row, __ffs(targets) - 1);
      store_row<kPayload>(p, row, out_row, unit.piece, piece, role.lane);
    }
    if (unit.piece == 0) {
      store_row_info(role, call, unit.source, unit.token, wanted, expert, my_row, weight_word);
    }
    if (is_own) stamp(Stamp::kOwnDone, rank);
  }
}

// ---- What is not rows

__device__ __forceinline__ void clear_entry(const LlDispatchParams& p, int64_t row) {
  if (has_expert_rows(p.output.layout)) {
    p.out_weights[row] = 0;
    if (p.row_expert != nullptr) p.row_expert[row] = -1;
    return;
  }
  for (int k = 0; k < p.shape.topk; k++) {
    const int64_t entry = row * p.shape.topk + k;
    p.out_weights[entry] = 0;
    if (p.is_idx64) {
      static_cast<int64_t*>(p.out_topk_idx)[entry] = -1;
    } else {
      static_cast<int32_t*>(p.out_topk_idx)[entry] = -1;
    }
  }
}

// A warp fills rows [from, to) with zeros.
static __device__ __noinline__ void zero_rows(const LlDispatchParams& p, int64_t from, int64_t to) {
  const int chunks = p.row.payload_bytes / kLaneBytes;
  auto* out = static_cast<uint4*>(p.out_x);
  for (int64_t i = from * chunks + lane_id(); i < to * chunks; i += 32) ptx::st(out + i, make_uint4(0, 0, 0, 0));
  const Scales& scales = p.out_scales;
  for (int64_t i = from * scales.count + lane_id(); scales.data != nullptr && i < to * scales.count; i += 32) {
    const int64_t element = i / scales.count * scales.row_stride + i % scales.count * scales.group_stride;
    for (int b = 0; b < scales.element_bytes; b++) {
      static_cast<uint8_t*>(scales.data)[element * scales.element_bytes + b] = 0;
    }
  }
}

// A warp clears rows [from, to) that do not exist: ids -1, weights 0, and the content if the caller asks for zeros.
__device__ __forceinline__ void clear_rows(const LlDispatchParams& p, int64_t from, int64_t to) {
#pragma unroll 1
  for (int64_t row = from + lane_id(); row < to; row += 32) clear_entry(p, row);
  if (p.zero_padding) zero_rows(p, from, to);
}

// A warp does so for bins first, first + step, ...
static __device__ __noinline__ void clear_missing_rows(const LlDispatchParams& p, const Places places, int first_bin,
                                                       int step) {
  const OutputShape& output = p.output;
#pragma unroll 1
  for (int bin = first_bin; bin < output.bins(); bin += step) {
    const int demand = demand_of(p, places, bin);
    int64_t first = 0, end = 0, start = 0;
    if (output.layout == OutputLayout::kPacked) {
      start = min(static_cast<int64_t>(places.starts[bin]), output.capacity);
      end = bin + 1 < output.bins() ? min(static_cast<int64_t>(places.starts[bin + 1]), output.capacity)
                                    : output.capacity;
      first = start;
    } else if (output.layout == OutputLayout::kFlat) {
      if (bin != 0) continue;
      end = output.capacity;
      const int total = places.count_bits(0, 0, p.shape.num_ranks * p.shape.max_tokens);
      clear_rows(p, min(static_cast<int64_t>(total), end), end);
      continue;
    } else {
      const int64_t limit = output.rows() / output.bins();
      first = bin * limit;
      end = first + limit;
    }
    clear_rows(p, first + output.kept(start, demand), end);
  }
}

// One warp writes the info tensor.
static __device__ __noinline__ void store_info(const LlDispatchParams& p, const CallContext& call,
                                               const Places places) {
  const OutputShape& output = p.output;
  const int lane = lane_id();
  const bool has_failed = call.has_failed();  // then nothing counts
  int dropped = 0, total = 0;
#pragma unroll 1
  for (int bin = lane; bin < output.bins(); bin += 32) {
    const int demand = has_failed ? 0 : demand_of(p, places, bin);
    int64_t start = 0;
    if (output.layout == OutputLayout::kPacked) start = places.starts[bin];
    if (output.layout == OutputLayout::kFlat) start = places.count_bits(0, 0, bin * p.shape.max_tokens);
    const int kept = static_cast<int>(output.kept(start, demand));
    p.info[bin] = kept;
    p.info[output.demand_at() + bin] = demand;
    dropped += demand - kept;
    total += kept;
  }
#pragma unroll 1
  for (int i = lane; i < output.num_offsets(); i += 32) {
    p.info[output.offsets_at() + i] = static_cast<int>(min(static_cast<int64_t>(places.starts[i]), output.capacity));
  }
#pragma unroll 1
  for (int r = lane; r < p.shape.num_ranks; r += 32) p.handle.tokens[r] = places.tokens[r];
  dropped = __reduce_add_sync(~0u, dropped);
  total = __reduce_add_sync(~0u, total);
  if (lane != 0) return;
  p.info[output.overflow_at()] = dropped;
  p.info[output.total_at()] = total;
  if (dropped != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&call.state->found.dropped_rows),
              static_cast<unsigned long long>(dropped));
  }
}

// The buffer has failed: nothing was received.
static __device__ __noinline__ void store_nothing(const DispatchRole role) {
  const LlDispatchParams& p = role.p;
  if (!receives(p.half)) return;
  const int64_t thread = role.at.block * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(role.at.num_blocks) * blockDim.x;
  for (int64_t i = thread; i < p.output.info_size(); i += threads) p.info[i] = 0;
  for (int64_t i = thread; i < p.shape.num_ranks; i += threads) p.handle.tokens[i] = 0;
  for (int64_t row = thread; row < p.output.rows(); row += threads) clear_entry(p, row);
}

template <Payload kPayload, DType kType, int kSteps>
__device__ __forceinline__ void receive(const DispatchRole& role, const CallContext& call, const RowShape& row,
                                        const Places& places) {
  const LlDispatchParams& p = role.p;
  build_places(p, role.peers, call, places, role.receiving_thread(), role.receiving_threads());
  ptx::named_barrier(1, role.receiving_threads());
  stamp(Stamp::kRoutingKnown, role.peers.rank);
  if (p.output.layout == OutputLayout::kPacked) {
    if (role.receiving_thread() < 32) find_starts(p, places);
    ptx::named_barrier(1, role.receiving_threads());
  }
  // The last warps have the fewest rows to move: the very last writes the info tensor, those before it clear a bin
  // each.
  const int from_last = role.plan.receivers() - 1 - role.receiver();
  const int clearing = max(role.plan.receivers() - 1, 1);
  if (from_last == 0) store_info(p, call, places);
  const int first_bin = role.plan.receivers() == 1 ? 0 : from_last - 1;
  if (first_bin >= 0 && first_bin < p.output.bins()) clear_missing_rows(p, places, first_bin, clearing);
  receive_rows<kPayload, kType, kSteps>(role, call, row, places);
}

// ---- Table of contents

template <Payload kPayload, DType kType, int kSteps>
__device__ __forceinline__ void dispatch(const LlDispatchParams& p, const LsaPeers& peers, DeviceState* state,
                                         const LlPlan& plan, BlockPosition at, char* shared) {
  const DispatchRole role{{plan, at, lane_id(), warp_id()}, p, peers};
  const RowShape row = RowShape::of<kPayload>(p);
  const Places places = Places::at(shared, p);
  stamp(Stamp::kStart, peers.rank);
  if (receives(p.half)) places.clear(threadIdx.x, blockDim.x);
  ptx::launch_dependents();
  ptx::wait_for_prerequisites();

  // What a warp sends first is on its way while the epoch is.
  const Opening opening = open_call(state, Kind::kDispatch);
  Raw<kPayload, kSteps> raw;
  int64_t row_id = -1, routing_id = -1;
  float weight = 1.0f;
  if (sends(p.half)) {
    const int pieces = ceil_div(row.steps, kSteps);
    const int unit = role.sender(), token = role.routing_token();
    if (at.block < plan.sender_blocks && token < p.num_tokens) {
      routing_id = own_id(role, token);
      weight = own_weight(role, token);
    }
    if (role.is_sender() && unit < p.num_tokens * pieces) {
      row_id = own_id(role, unit / pieces);
      raw.load(p, row, unit / pieces, unit % pieces, role.lane);
    }
  }
  __shared__ CallContext call;
  begin_call(call, p, state, peers, opening, Kind::kDispatch, at, receives(p.half));
  stamp(Stamp::kEpochKnown, peers.rank);
  if (call.begins_failed) return store_nothing(role);

  if (sends(p.half)) {
    if (role.is_control()) {
      send_records(call, p.layout, peers);
      send_credits(call, p.layout, peers);
    }
    if (at.block < plan.sender_blocks) send_all_routing(role, call, routing_id, weight);
    if (role.is_sender()) send_rows<kPayload, kType, kSteps>(role, call, row, raw, row_id);
    stamp(Stamp::kSent, peers.rank);
  }
  if (receives(p.half) && role.is_control()) check_records(call, p.layout, peers);
  if (receives(p.half) && role.is_receiver()) receive<kPayload, kType, kSteps>(role, call, row, places);
  stamp(Stamp::kEnd, peers.rank);
}

}  // namespace ep
