// How every kernel begins and how ranks greet one another: epochs, call records, routing messages.
#pragma once

#include "cuda/ll/geometry.h"
#include "cuda/protocol/wait.cuh"
#include "cuda/testing/testing.cuh"
#include "transport/device/lsa_peers.h"

namespace ep {
inline namespace EP_KERNELS {

// This block of this rank: in a world on one GPU, a launch holds the blocks of all ranks.
struct BlockPosition {
  int block;
  int num_blocks;

  __device__ static BlockPosition own() { return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}; }
  // `blocks`: of each rank.
  __device__ static BlockPosition in_world(int blocks) { return {static_cast<int>(blockIdx.x) % blocks, blocks}; }
};

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }

// What the plan has for this warp.
struct WarpRole {
  const LlPlan& plan;
  BlockPosition at;
  int lane, warp;

  __device__ bool is_planned_sender() const { return at.block < plan.sender_blocks && warp < plan.sender_warps; }
  __device__ bool is_planned_receiver() const {
    return at.block >= plan.receiver_block0 && warp >= plan.receiver_warp0 &&
           warp < plan.receiver_warp0 + plan.receiver_warps;
  }
  // One warp greets the other ranks and listens to them, another (where there are two blocks) tells them of free banks.
  __device__ bool is_control() const { return at.block == 0 && warp == plan.warps - 1; }
  __device__ bool is_creditor() const { return at.block == min(1, at.num_blocks - 1) && warp == plan.warps - 1; }
};

__device__ __forceinline__ bool is_opener() { return threadIdx.x >= blockDim.x - 32; }

// Whether ranks `lane` and `lane` + 32 are masked.
struct MaskedLane {
  uint32_t is_masked[2];

  __device__ __forceinline__ void load(const DeviceState* state) {
    for (int i = 0; i < 2; i++) is_masked[i] = ptx::ld_relaxed_gpu(&state->masks.is_masked[lane_id() + 32 * i]);
  }
  // The opener's, for the other warps of its block.
  __device__ __forceinline__ void note(CallContext& context, int rank, int num_ranks) const {
    const uint32_t low = __ballot_sync(~0u, is_masked[0] != 0), high = __ballot_sync(~0u, is_masked[1] != 0);
    const uint64_t masked = static_cast<uint64_t>(high) << 32 | low;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int turn = lane_id() + 32 * i;
      const uint32_t turns = __ballot_sync(~0u, turn < num_ranks && (masked >> (rank + 1 + turn) % num_ranks & 1) != 0);
      if (lane_id() != 0) continue;
      context.masked[i] = i == 0 ? low : high;
      context.masked_turns[i] = turns;
    }
    __syncwarp();
  }
};

// A call begins with loads that nobody looks at yet: the last warp of a block asks for the epoch and for the credits of
// all ranks (an acquire holds up what follows it), the others for what they send first. begin_call() looks.
//
// Instructions count: a warp alone needs 5 cycles for each, and a call of one token lasts 4,000. What can be done
// before the epoch is known is done before, and the epoch is asked for first.
struct Opening {
  uint64_t last_epoch = 0;
  uint64_t credit = 0;  // of rank `lane`
  uint32_t has_failed = 0;
  Kind kind;
  ptx::SharedAddress opened_at;  // the word of tag, bank and is_open
  MaskedLane masked;             // kMasksRanks
};

struct Nothing {
  __device__ void operator()() const {}
};

// The flag must be closed before anybody looks at it; the opener waits for nobody. `others_ask`: the first loads of the
// other warps, and what they can do beside them.
constexpr int kOpeningBarrier = 2, kTestingBarrier = 3;
template <class Args, class Ask = Nothing>
__device__ __forceinline__ Opening open_call(CallContext& call, const Args& args, Kind kind, Ask others_ask = {}) {
  testing_point_before_call(args.state->epoch[static_cast<int>(kind)].epoch, kind, args.peers.rank);
  Opening opening;
  opening.kind = kind;
  opening.opened_at = ptx::opaque(ptx::shared_address(&call.tag));
  if (!is_opener()) {
    others_ask();
    ptx::named_barrier(kOpeningBarrier, static_cast<int>(blockDim.x));
    return opening;
  }
  opening.last_epoch = ptx::ld_relaxed_gpu(&args.state->epoch[static_cast<int>(kind)].epoch);
  opening.has_failed = ptx::ld_relaxed_gpu(&args.state->fate.has_failed);
  if (kMasksRanks) opening.masked.load(args.state);
  call.is_open = CallContext::kClosed;
  call.state = args.state;
  call.call = &args.params.call;
  call.kind = kind;
  call.rank = args.peers.rank;
  ptx::named_barrier_arrive(kOpeningBarrier, static_cast<int>(blockDim.x));
  if (lane_id() < args.num_ranks) opening.credit = ptx::ld_acquire_sys(args.credits + lane_id());
  return opening;
}

// Waits until every rank has begun the call before this one, and so has emptied the bank that this call writes to. The
// acquire pairs with send_credits(); the flag of the block hands it on. No masked rank is waited for. False: the wait
// was given up.
template <class Args>
__device__ __noinline__ bool await_credits(const CallContext& call, const Args& args, uint64_t last_epoch,
                                           uint64_t credit_of_lane) {
  Patience patience;
#pragma unroll 1
  for (int source = lane_id(); source < args.num_ranks; source += 32) {
    if (is_masked(call, source)) continue;
    uint64_t credit = credit_of_lane;
    if (source >= 32) credit = ptx::ld_acquire_sys(args.credits + source);
    if (!kMasksRanks) patience = {};
    while (credit < last_epoch) {
      if (patience.is_over(call, Phase::kArrivalSignal, source, last_epoch, credit)) {
        if (!kMasksRanks || call.has_failed()) return false;
        break;
      }
      credit = ptx::ld_acquire_sys(args.credits + source);
    }
  }
  return true;
}

// The opener fills the block's context, the other warps wait for it: each as late as it can, as a barrier would make
// all wait for the slowest. `call`: the warp's. False: the buffer has failed, and nothing may be sent.
template <class Args>
__device__ __forceinline__ bool begin_call(CallContext& context, OpenCall& call, const Args& args,
                                           const Opening& opening) {
  if (!is_opener()) {
    testing_barrier(kTestingBarrier, static_cast<int>(blockDim.x));
    OpenedWord word;
    do {
      word.value = ptx::ld_acquire_shared_u64(opening.opened_at);
    } while (word.is_open() == CallContext::kClosed);
    call.open(word);
    return word.is_open() == CallContext::kOpen;
  }
  const uint64_t epoch = opening.last_epoch + 1;
  context.epoch = epoch;
  call.tag = tag_of(epoch);
  call.bank = has_bug(Bug::kOneBank, opening.kind) ? 0 : bank_of(epoch);
  if (kMasksRanks) opening.masked.note(context, args.peers.rank, args.num_ranks);
  const bool has_credit = lane_id() >= args.num_ranks || opening.credit >= opening.last_epoch ||
                          is_masked(context, lane_id()) || has_bug(Bug::kIgnoredCredits, opening.kind);
  bool is_well = opening.has_failed == 0;
  if (args.num_ranks > 32 || !__all_sync(~0u, has_credit)) {
    is_well = await_credits(context, args, opening.last_epoch, opening.credit) && is_well;
    if (kMasksRanks) {
      MaskedLane masked;
      masked.load(context.state);
      masked.note(context, args.peers.rank, args.num_ranks);
    }
  }
  is_well = __all_sync(~0u, is_well);
  __syncwarp();
  const auto is_open = is_well ? CallContext::kOpen : CallContext::kFailed;
  ptx::st_release_shared_u64(opening.opened_at, OpenedWord::of(call.tag, call.bank, is_open).value);
  testing_barrier(kTestingBarrier, static_cast<int>(blockDim.x));
  return is_well;
}

// The opener calls it once in a call, a sending half leaves it to its receiving half: the last block to come moves the
// epoch on. All have read it by then. Not before what other ranks wait for is sent: the ticket takes its time.
template <class Args>
__device__ __forceinline__ void advance_epoch(const Args& args, const Opening& opening, Kind kind, BlockPosition at) {
  if (!is_opener() || lane_id() != 0) return;
  const int k = static_cast<int>(kind);
  testing_point_before_epoch(opening.last_epoch, kind, args.peers.rank);
  TicketLine& ticket = args.state->ticket[k];
  const uint32_t place = atomicAdd(&ticket.started, 1u);
  if (has_bug(Bug::kEarlyEpoch, kind) && place == 0) {
    ptx::st_relaxed_gpu(&args.state->epoch[k].epoch, opening.last_epoch + 1);
  }
  if (place == static_cast<uint32_t>(at.num_blocks) - 1) {
    ptx::st_relaxed_gpu(&ticket.started, 0u);
    if (has_bug(Bug::kReusedEpoch, kind) && opening.last_epoch % 5 == 4) return;
    ptx::st_relaxed_gpu(&args.state->epoch[k].epoch, opening.last_epoch + 1);
  }
}

// Word `i` of the own call record's copies for all ranks, ready to be sent as soon as the epoch is known: others wait
// for it, and `record` is a kernel's parameter, slow to read through a pointer.
struct RecordLane {
  uint64_t* target = nullptr;  // in bank 0
  uint32_t value = 0;

  __device__ __forceinline__ static RecordLane of(const CallRecord& record, const LlLayout& layout,
                                                  const LsaPeers& peers, int i) {
    const int peer = i / CallRecord::kWords, word = i % CallRecord::kWords;
    RecordLane lane;
    lane.value = record.word(word);
    if (peer < layout.num_ranks) {
      lane.target = ptx::opaque(peers.at<uint64_t>(peer, layout.record(0, peers.rank)) + word);
    }
    return lane;
  }
  // As word `i` of an open call. A masked rank is told so, and may still read the rest of an earlier record.
  __device__ __forceinline__ void send(const OpenCall& call, const LlLayout& layout, int i) const {
    if (target == nullptr) return;
    uint64_t* word = target + call.bank * layout.num_ranks * CallRecord::kWords;
    if (!kMasksRanks || i % CallRecord::kWords != CallRecord::kIsMasked) {
      if (!is_masked(call, i / CallRecord::kWords)) ptx::st_relaxed_sys(word, tagged(value, call.tag));
      return;
    }
    // Last, and as it is now: another block may have told it already.
    ptx::st_relaxed_sys(word, tagged(is_masked_now(call, i / CallRecord::kWords) ? 1 : 0, call.tag));
  }
};

// One warp sends the call record to every rank, itself included. `lane`: its first 32 words.
__device__ __forceinline__ void send_records(const OpenCall& call, const LlLayout& layout, const LsaPeers& peers,
                                             const RecordLane& lane) {
  testing_point(Point::kBeforeRecord, call);
  lane.send(call, layout, lane_id());
#pragma unroll 1
  for (int i = lane_id() + 32; i < layout.num_ranks * CallRecord::kWords; i += 32) {
    RecordLane::of(*call.context.call, layout, peers, i).send(call, layout, i);
  }
  testing_point(Point::kAfterRecord, call);
}
__device__ __forceinline__ void send_records(const OpenCall& call, const LlLayout& layout, const LsaPeers& peers) {
  send_records(call, layout, peers, RecordLane::of(*call.context.call, layout, peers, lane_id()));
}

// The same warp tells every rank that the banks of all earlier calls are empty here. The fence takes longer than a
// message: nobody waits for a credit before the next call begins, in await_credits().
__device__ __forceinline__ void send_credits(const CallContext& context, const LlLayout& layout,
                                             const LsaPeers& peers) {
  testing_point(Point::kBeforeCredits, context);
  __threadfence_system();
#pragma unroll 1
  for (int peer = lane_id(); peer < layout.num_ranks; peer += 32) {
    ptx::st_relaxed_sys(peers.at<uint64_t>(peer, layout.signal(context.rank)), context.epoch);
  }
}

// `record`: where the words of `source` lie, which are not those of the own call.
__device__ __forceinline__ void refuse_record(const CallContext& context, const uint64_t* record, int source) {
  CallRecord theirs;
  for (int i = 0; i < CallRecord::kWords; i++) {
    theirs.words[i] = await_word(OpenCall(context), record + i, Phase::kCallRecord, source);
  }
  fail(context, Failure::kOtherCall, Phase::kCallRecord, source, 0, 0, theirs);
}

static __device__ __noinline__ void refuse_call(const CallContext& context, const LlLayout& layout,
                                                const LsaPeers& peers, int source) {
  refuse_record(context, peers.local<uint64_t>(layout.record(context.bank, source)), source);
}

// One warp waits for the call records of all ranks and compares them with the own call.
// `wait_cost`: optional [R], ns that each other rank came later are added.
__device__ __forceinline__ void check_records(const CallContext& context, const LlLayout& layout, const LsaPeers& peers,
                                              int64_t* wait_cost = nullptr) {
  if (has_bug(Bug::kUncheckedRecords, context.kind)) return;
  const uint64_t start = wait_cost != nullptr ? ptx::global_timer_ns() : 0;
  Patience patience;
#pragma unroll 1
  for (int i = lane_id(); i < layout.num_ranks * CallRecord::kWords; i += 32) {
    const int source = i / CallRecord::kWords, word = i % CallRecord::kWords;
    if (is_masked(context, source)) continue;
    const auto* record = peers.local<uint64_t>(layout.record(context.bank, source)) + word;
    if (!kMasksRanks) patience = {};
    uint64_t seen = ptx::ld_relaxed_sys(record);
    while (!is_tagged(seen, context.tag) &&
           !patience.is_over(context, Phase::kCallRecord, source, context.tag, seen >> 32)) {
      seen = ptx::ld_relaxed_sys(record);
    }
    const bool differs = word < CallRecord::kComparedWords && is_tagged(seen, context.tag) &&
                         static_cast<uint32_t>(seen) != context.call->word(word);
    if (differs) refuse_call(context, layout, peers, source);
    const bool is_left =
        word == CallRecord::kIsMasked && is_tagged(seen, context.tag) && static_cast<uint32_t>(seen) != 0;
    if (kMasksRanks && is_left) ptx::st_relaxed_gpu(&context.state->masks.is_masked[source], 1);
    if (wait_cost != nullptr && word == CallRecord::kNumTokens && source != peers.rank) {
      wait_cost[source] += static_cast<int64_t>(ptx::global_timer_ns() - start);
    }
  }
}

__device__ __forceinline__ int64_t load_id(const void* ids, bool is_idx64, int64_t index) {
  return is_idx64 ? __ldg(static_cast<const long long*>(ids) + index) : __ldg(static_cast<const int*>(ids) + index);
}

__device__ __forceinline__ void store_id(void* ids, bool is_idx64, int64_t index, int id) {
  if (is_idx64) {
    static_cast<int64_t*>(ids)[index] = id;
  } else {
    static_cast<int32_t*>(ids)[index] = id;
  }
}

// Weights and ids of an output row that does not exist, in either mode.
template <class Params>
__device__ __forceinline__ void clear_entry(const Params& p, bool expert_rows, int64_t row) {
  if (expert_rows) {
    p.out_weights[row] = 0;
    if (p.row_expert != nullptr) p.row_expert[row] = -1;
    return;
  }
  for (int k = 0; k < p.shape.topk; k++) {
    const int64_t entry = row * p.shape.topk + k;
    p.out_weights[entry] = 0;
    store_id(p.out_topk_idx, p.is_idx64, entry, -1);
  }
}

// Choice k of an own token is `id`, which is no expert.
__device__ __forceinline__ void note_invalid_id(DeviceState* state, int64_t id, int token, int k) {
  if (id == -1) return;
  InvalidIds& invalid = state->found.invalid_ids;
  if (atomicAdd(reinterpret_cast<unsigned long long*>(&invalid.count), 1ull) == 0) {
    invalid.value = id;
    invalid.token = token;
    invalid.k = k;
  }
}

// An id as it lies in memory, of either type: two loads that nobody waits for. A choice between loads of two widths
// would be widened where it is loaded, and so waited for.
struct RawId {
  uint32_t low, high;

  __device__ __forceinline__ static RawId load(const void* ids, bool is_idx64, int64_t index) {
    const auto* p = static_cast<const char*>(ids) + (index << (is_idx64 ? 3 : 2));
    return {__ldg(reinterpret_cast<const uint32_t*>(p)),
            __ldg(reinterpret_cast<const uint32_t*>(p + (is_idx64 ? 4 : 0)))};
  }
  __device__ __forceinline__ int64_t value(bool is_idx64) const {
    return is_idx64 ? static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low) : static_cast<int32_t>(low);
  }
  // The id if it is below `limit`, else -1.
  __device__ __forceinline__ int64_t below(int limit, bool is_idx64) const {
    return low < static_cast<uint32_t>(limit) && (high == 0 || !is_idx64) ? static_cast<int64_t>(low) : -1;
  }
};

// A choice of a token: the rank of its expert and the expert's number there; rank -1 if there is none.
struct Choice {
  int rank = -1;
  int expert = 0;

  __device__ __forceinline__ static Choice of(int64_t id, int num_experts, const Divisor& by_local_experts) {
    Choice choice;
    if (id < 0 || id >= num_experts) return choice;
    choice.rank = by_local_experts.divide(static_cast<int>(id));
    choice.expert = by_local_experts.remainder(static_cast<int>(id), choice.rank);
    return choice;
  }
};

// Ranks that have an expert of the token whose choices the lanes hold.
__device__ __forceinline__ uint64_t destinations(int num_ranks, const Choice& choice) {
  const uint32_t low = __reduce_or_sync(~0u, choice.rank >= 0 && choice.rank < 32 ? 1u << choice.rank : 0);
  if (num_ranks <= 32) return low;
  const uint32_t high = __reduce_or_sync(~0u, choice.rank >= 32 ? 1u << (choice.rank - 32) : 0);
  return static_cast<uint64_t>(high) << 32 | low;
}

// What a lane sends of a token's routing: a word of ids to one rank, and the weight of choice `lane` to the rank of its
// expert. Lane k holds choice k; lane i of pass n has word 32 n + i of the messages to all ranks. Targets lie in bank
// 0, so that everything is ready when the epoch comes.
struct RoutingLane {
  uint64_t* ids = nullptr;
  uint64_t* weight = nullptr;  // before fill(): where rank 0 keeps the weight of choice `lane`
  uint32_t word = 0;
  float value = 0;
  int peer, index;

  __device__ __forceinline__ static int passes(const LlLayout& layout) {
    return ceil_div(layout.num_ranks * layout.ids.words(), 32);
  }
  // Where a lane's words go: all that does not need the ids.
  __device__ __forceinline__ static RoutingLane aimed(const LlLayout& layout, const LsaPeers& peers,
                                                      const Divisor& by_id_words, int pass, int token) {
    RoutingLane lane;
    lane.peer = by_id_words.divide(pass * 32 + lane_id());
    lane.index = by_id_words.remainder(pass * 32 + lane_id(), lane.peer);
    lane.ids =
        ptx::opaque(peers.at<uint64_t>(lane.peer, layout.id_words<kMasksRanks>(0, peers.rank, token)) + lane.index);
    lane.weight = ptx::opaque(peers.at<uint64_t>(0, layout.weight<kMasksRanks>(0, peers.rank, token, lane_id())));
    return lane;
  }
  __device__ __forceinline__ void fill(const LlLayout& layout, const LsaPeers& peers, int pass, const Choice& choice,
                                       float weight_of_choice) {
    const int per_word = layout.ids.per_word(), bits = layout.ids.bits;
    const uint32_t none = layout.ids.none();
    const uint32_t mine = choice.rank < 0 ? ~0u : static_cast<uint32_t>(choice.rank << 16 | choice.expert);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j >= per_word) break;
      const uint32_t theirs = __shfl_sync(~0u, mine, index * per_word + j);
      word |= (theirs >> 16 == static_cast<uint32_t>(peer) ? theirs & 0xFFFF : none) << j * bits;
    }
    if (peer >= layout.num_ranks) ids = nullptr;
    value = weight_of_choice;
    weight = pass != 0 || choice.rank < 0 ? nullptr : weight + choice.rank * (peers.stride / sizeof(uint64_t));
  }
  __device__ __forceinline__ static RoutingLane of(const LlLayout& layout, const LsaPeers& peers,
                                                   const Divisor& by_id_words, int pass, int token,
                                                   const Choice& choice, float weight) {
    RoutingLane lane = aimed(layout, peers, by_id_words, pass, token);
    lane.fill(layout, peers, pass, choice, weight);
    return lane;
  }
  // `rank`: of the choice.
  __device__ __forceinline__ void send(const OpenCall& call, const LlLayout& layout, int rank) const {
    const int64_t offset = call.bank * static_cast<int64_t>(layout.tagged_bank_bytes / sizeof(uint64_t));
    if (ids != nullptr && !is_masked(call, peer)) ptx::st_relaxed_sys(ids + offset, tagged(word, call.tag));
    if (weight != nullptr && !is_masked(call, rank)) {
      ptx::st_relaxed_sys(weight + offset, tagged(__float_as_uint(value), call.tag));
    }
  }
};

// One warp sends the routing of an own token to every rank, itself included.
__device__ __forceinline__ void send_routing(const OpenCall& call, const LlLayout& layout, const LsaPeers& peers,
                                             const Divisor& by_id_words, int first_pass, int token,
                                             const Choice& choice, float weight) {
#pragma unroll 1
  for (int pass = first_pass; pass < RoutingLane::passes(layout); pass++) {
    RoutingLane::of(layout, peers, by_id_words, pass, token, choice, weight).send(call, layout, choice.rank);
  }
}

// The sum over this lane and those before it, by add().
template <class T, class Add>
__device__ __forceinline__ T inclusive_sum(T value, const Add& add) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, step);
    if (lane_id() >= step) value = add(value, other);
  }
  return value;
}

// A warp: what comes before each of `count` values, into sums[0, count), and all of them, returned; no more than
// 2^31 - 1. value_of(i) may read sums[i].
template <class ValueOf>
__device__ __forceinline__ int exclusive_sums(int count, int* sums, const ValueOf& value_of) {
  const auto add = [](uint32_t a, uint32_t b) { return min(a + b, static_cast<uint32_t>(INT32_MAX)); };
  uint32_t next = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane_id();
    const uint32_t end = inclusive_sum(i < count ? static_cast<uint32_t>(value_of(i)) : 0u, add);
    const uint32_t before = __shfl_up_sync(~0u, end, 1);
    if (i < count) sums[i] = static_cast<int>(add(next, lane_id() > 0 ? before : 0));
    next = add(next, __shfl_sync(~0u, end, 31));
  }
  return static_cast<int>(next);
}

}  // namespace EP_KERNELS
}  // namespace ep
