// How kernels of high throughput begin, what ranks tell one another before rows move, and signals. One GPU's blocks
// need not run at the same time: what a rank owes the others is handed out by counters, so that whichever blocks run do
// all of it; beside such work they wait only for what block 0 of each rank sends first.
#pragma once

#include "cuda/host/launch.h"
#include "cuda/protocol/op_context.cuh"
#include "layout/ht/routing.h"

namespace ep {

// What the threads of a block know of their place.
struct HtBlock {
  BlockPosition at;
  int lane = lane_id(), warp = warp_id();

  __device__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ bool is_first() const { return at.block == 0; }
};

// True for all threads of the block if one of them has given up a wait, or has seen another call's record. A barrier.
// Whoever gave up reads what it wrote itself.
__device__ __forceinline__ bool block_has_failed(const CallContext& call) {
  return __syncthreads_or(call.has_given_up != 0) != 0;
}

// One thread of each block that has read the epoch.
__device__ __forceinline__ void move_ht_epoch(const CallContext& call, TicketLine& ticket, EpochLine& line,
                                              BlockPosition at) {
  testing_point_before_epoch(call.epoch - 1, call.kind, call.rank);
  __threadfence();  // the epoch is read before others may move it on
  const uint32_t place = atomicAdd(&ticket.started, 1u);
  if (has_bug(Bug::kEarlyEpoch, call.kind) && place == 0) ptx::st_relaxed_gpu(&line.epoch, call.epoch);
  if (place != static_cast<uint32_t>(at.num_blocks) - 1) return;
  ptx::st_relaxed_gpu(&ticket.started, 0u);
  if (has_bug(Bug::kReusedEpoch, call.kind) && call.epoch % 5 == 0) return;
  ptx::st_relaxed_gpu(&line.epoch, call.epoch);
}

// Release: this rank's last operation is over, so what it wrote is there, and what it read may be written again.
// Receivers acquire by the record's words, so the one warp that stores them fences, and nothing else of the message
// needs to come after: the record may go long before the rest. What this kernel itself does is not released.
__device__ __forceinline__ void send_record(const CallContext& call, const HtLayout& layout, const LsaPeers& peers) {
  testing_point(Point::kBeforeRecord, call);
  __threadfence_system();
#pragma unroll 1
  for (int i = lane_id(); i < CallRecord::kWords * layout.topology.num_ranks; i += 32) {
    const int peer = i / CallRecord::kWords, index = i % CallRecord::kWords;
    ptx::st_relaxed_sys(peers.at<uint64_t>(peer, layout.call_word(call.bank, call.rank, index)),
                        tagged(call.call->word(index), call.tag));
  }
}

static __device__ __noinline__ void send_record_after_all(const CallContext& call, const HtLayout& layout,
                                                          const LsaPeers& peers) {
  send_record(call, layout, peers);
}

// Every block reads the epoch; the last to have done so moves it on, unless a further kernel belongs to the call.
// False: the buffer has failed. If it has in this call, over what another rank has sent, that rank must hear of this
// one: the first block tells it, as it would have if it had come sooner.
template <class Args>
__device__ __forceinline__ bool open_ht_call(CallContext& call, const Args& args, Kind kind, BlockPosition at,
                                             bool is_first_kernel, bool is_last_kernel) {
  const int k = static_cast<int>(kind);
  if (threadIdx.x == 0) {
    testing_point_before_call(args.state->ht_epoch[k].epoch, kind, args.peers.rank);
    call.state = args.state;
    call.call = &args.params.call;
    call.kind = kind;
    call.rank = args.peers.rank;
    const uint64_t last_epoch = ptx::ld_relaxed_gpu(&args.state->ht_epoch[k].epoch);
    const uint32_t has_failed = ptx::ld_relaxed_gpu(&args.state->fate.has_failed);
    call.epoch = last_epoch + 1;
    call.tag = tag_of(call.epoch);
    call.bank = has_bug(Bug::kOneBank, kind) ? 0 : bank_of(call.epoch);
    call.has_given_up = 0;
    call.is_open = has_failed == 0                    ? CallContext::kOpen
                   : has_failed == failure_mark(call) ? CallContext::kFailedMeanwhile
                                                      : CallContext::kFailed;
  }
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1 && is_last_kernel) {
    move_ht_epoch(call, args.state->ht_ticket[k], args.state->ht_epoch[k], at);
  }
  if (call.is_open == CallContext::kFailedMeanwhile && is_first_kernel && at.block == 0 && warp_id() == 0) {
    send_record_after_all(call, args.params.layout, args.peers);
  }
  return call.is_open == CallContext::kOpen;
}

__device__ __forceinline__ HtCounters& counters_of(const CallContext& call) {
  return call.state->ht_counters[static_cast<int>(call.kind)][call.epoch & 1];
}

// The first block clears the counters of the next operation: its last user, the operation before this one, is over.
__device__ __forceinline__ void clear_next_counters(const CallContext& call) {
  if (has_bug(Bug::kSkippedReset, call.kind)) return;
  auto* words = reinterpret_cast<uint32_t*>(&call.state->ht_counters[static_cast<int>(call.kind)][~call.epoch & 1]);
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < sizeof(HtCounters) / 4; i += blockDim.x) words[i] = 0;
}

// Shared memory, taken table by table.
struct SharedTables {
  char* next;

  template <class T>
  __device__ T* take(int count) {
    auto* table = reinterpret_cast<T*>(next);
    next += count * sizeof(T);
    return table;
  }
};

// A number that a handle has, which is in device memory: if it was changed it must not reach beyond what there is.
__device__ __forceinline__ int within(int number, int64_t most) {
  return static_cast<int>(min(max(static_cast<int64_t>(number), int64_t{0}), most));
}

// Tokens of a rank with an expert of another.
template <class Params>
__device__ __forceinline__ int count_in_handle(const Params& p, int source, int receiver) {
  return within(p.handle.counts[source * p.shape.num_ranks + receiver], p.shape.max_tokens);
}

// Rows between this rank and each other, in shared memory.
struct Flows {
  int *to, *to_first;      // [R] own tokens with an expert there, and their first slot there
  int *from, *from_first;  // [R] rows here of each home, and the first slot

  __device__ static Flows of(SharedTables& tables, int ranks) {
    return {tables.take<int>(ranks), tables.take<int>(ranks), tables.take<int>(ranks), tables.take<int>(ranks)};
  }
  // An own token may have it there.
  __device__ __forceinline__ bool has_slot(int rank, int32_t slot) const {
    return static_cast<unsigned>(slot - to_first[rank]) < static_cast<unsigned>(to[rank]);
  }
  // A warp. count_of(source, receiver): tokens of a rank with an expert of another.
  template <class CountOf>
  __device__ __forceinline__ void fill(int ranks, int rank, int other, const CountOf& count_of) const {
    int before_to = 0, before_from = 0;
#pragma unroll 1
    for (int first = 0; first < ranks; first += 32) {
      const int source = first + lane_id();
      const int there = source < ranks ? count_of(source, other) : 0;
      const int here = source < ranks ? count_of(source, rank) : 0;
      if (source == rank) to[other] = there;
      if (source == other) from[other] = here;
      before_to += __reduce_add_sync(~0u, source < rank ? there : 0);
      before_from += __reduce_add_sync(~0u, source < other ? here : 0);
    }
    if (lane_id() != 0) return;
    to_first[other] = before_to;
    from_first[other] = before_from;
  }
};

// ---- Call messages

// A block tells every rank `word_of(i)` for the words behind the record, up to `words`.
template <class WordOf>
__device__ __forceinline__ void send_call_words(const CallContext& call, const HtLayout& layout, const LsaPeers& peers,
                                                int words, const WordOf& word_of) {
  const int ranks = layout.topology.num_ranks;
#pragma unroll 1
  for (int index = CallRecord::kWords + threadIdx.x; index < words; index += blockDim.x) {
    const uint64_t word = tagged(word_of(index), call.tag);
    const Offset offset = layout.call_word(call.bank, call.rank, index);
    int peer = peers.rank;
#pragma unroll 1
    for (int turn = 0; turn < ranks; turn++) {
      ptx::st_relaxed_sys(peers.at<uint64_t>(peer, offset), word);
      peer = peer + 1 < ranks ? peer + 1 : 0;
    }
  }
  testing_point(Point::kAfterRecord, call);
}

// One block sends the whole message.
template <class WordOf>
__device__ __forceinline__ void send_call(const CallContext& call, const HtLayout& layout, const LsaPeers& peers,
                                          int words, const WordOf& word_of) {
  if (warp_id() == 0) send_record(call, layout, peers);
  send_call_words(call, layout, peers, words, word_of);
}

// The same word of the messages of four sources from `first` on, asked for together. Sources past the last count as 0.
struct CallWords {
  static constexpr int kTogether = 4;
  uint32_t value[kTogether];

  __device__ __forceinline__ static CallWords await(const CallContext& call, const HtLayout& layout,
                                                    const LsaPeers& peers, int first, int index) {
    const int ranks = layout.topology.num_ranks;
    uint64_t seen[kTogether];
    const auto word = [&](int q) { return peers.local<uint64_t>(layout.call_word(call.bank, first + q, index)); };
#pragma unroll
    for (int q = 0; q < kTogether; q++) seen[q] = first + q < ranks ? ptx::ld_relaxed_sys(word(q)) : 0;
    CallWords words;
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      words.value[q] = static_cast<uint32_t>(seen[q]);
      if (first + q >= ranks) {
        words.value[q] = 0;
      } else if (!is_tagged(seen[q], call.tag)) {
        words.value[q] = await_word(OpenCall(call), word(q), Phase::kRouting, first + q);
      }
    }
    return words;
  }
};

// A word of the ranks before this one, and of all, added up.
struct WordSums {
  int before = 0, all = 0;

  __device__ __forceinline__ static WordSums await(const CallContext& call, const HtLayout& layout,
                                                   const LsaPeers& peers, int index) {
    WordSums sums;
#pragma unroll 1
    for (int first = 0; first < layout.topology.num_ranks; first += CallWords::kTogether) {
      const auto words = CallWords::await(call, layout, peers, first, index);
#pragma unroll
      for (int q = 0; q < CallWords::kTogether; q++) {
        if (first + q < peers.rank) sums.before += static_cast<int>(words.value[q]);
        sums.all += static_cast<int>(words.value[q]);
      }
    }
    return sums;
  }
};

__device__ __forceinline__ uint32_t await_call_word(const CallContext& call, const HtLayout& layout,
                                                    const LsaPeers& peers, int source, int index) {
  return await_word(OpenCall(call), peers.local<uint64_t>(layout.call_word(call.bank, source, index)), Phase::kRouting,
                    source);
}

__device__ __forceinline__ Offset await_call_offset(const CallContext& call, const HtLayout& layout,
                                                    const LsaPeers& peers, int source, int index) {
  const uint32_t low = await_call_word(call, layout, peers, source, index);
  const uint32_t high = await_call_word(call, layout, peers, source, index + 1);
  return low | static_cast<Offset>(high) << 32;
}

static __device__ __noinline__ void refuse_ht_call(const CallContext& call, const HtLayout& layout,
                                                   const LsaPeers& peers, int source) {
  refuse_record(call, peers.local<uint64_t>(layout.call_word(call.bank, source, 0)), source);
}

// A block waits for the records of all ranks and compares them. Acquire: see send_call().
__device__ __forceinline__ void await_records(const CallContext& call, const HtLayout& layout, const LsaPeers& peers) {
  if (has_bug(Bug::kUncheckedRecords, call.kind)) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < layout.topology.num_ranks * CallRecord::kWords; i += blockDim.x) {
    const int source = i / CallRecord::kWords, index = i % CallRecord::kWords;
    const auto* word = peers.local<uint64_t>(layout.call_word(call.bank, source, index));
    Patience patience;
    uint64_t seen = ptx::ld_acquire_sys(word);
    while (!is_tagged(seen, call.tag) && !patience.is_over(call, Phase::kCallRecord, source, call.tag, seen >> 32)) {
      seen = ptx::ld_acquire_sys(word);
    }
    const bool differs = index < CallRecord::kComparedWords && is_tagged(seen, call.tag) &&
                         static_cast<uint32_t>(seen) != call.call->word(index);
    if (differs) refuse_ht_call(call, layout, peers, source);
  }
}

// ---- Signals: words that hold the epoch of the last call that was announced

__device__ __forceinline__ uint64_t* signal_word(const HtLayout& layout, const LsaPeers& peers, int at_rank,
                                                 HtSignal which, int source, int chunk) {
  return peers.at<uint64_t>(at_rank, layout.signal(which, source)) + chunk;
}

// The caller's thread has seen, by a fence or a barrier, all that the signal announces.
__device__ __forceinline__ void send_signal(const CallContext& call, const HtLayout& layout, const LsaPeers& peers,
                                            int peer, HtSignal which, int chunk) {
  __threadfence_system();
  ptx::st_relaxed_sys(signal_word(layout, peers, peer, which, call.rank, chunk), call.epoch);
}

// Acquire, if so.
__device__ __forceinline__ bool is_signalled(const CallContext& call, const HtLayout& layout, const LsaPeers& peers,
                                             HtSignal which, int source, int chunk) {
  return ptx::ld_acquire_sys(signal_word(layout, peers, peers.rank, which, source, chunk)) >= call.epoch;
}

// Acquire. False: the wait was given up. Each acquire empties the SM's L1, so those that wait for long look without.
__device__ __forceinline__ bool await_signal(const CallContext& call, const HtLayout& layout, const LsaPeers& peers,
                                             HtSignal which, int source, int chunk, Phase phase) {
  const uint64_t* word = signal_word(layout, peers, peers.rank, which, source, chunk);
  Patience patience;
  uint64_t seen = ptx::ld_relaxed_sys(word);
  while (seen < call.epoch) {
    if (patience.is_over(call, phase, source, call.epoch, seen)) return false;
    seen = ptx::ld_relaxed_sys(word);
  }
  ptx::ld_acquire_sys(word);
  return true;
}

// ---- Work

// A warp: the last of `count` segments that begins at or before a unit; starts[i] is the i-th's first unit.
__device__ __forceinline__ int segment_of(const int* starts, int count, int unit) {
  int segment = -1;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const bool begins = first + lane_id() < count && starts[first + lane_id()] <= unit;
    segment += __popc(__ballot_sync(~0u, begins));
  }
  return segment;
}

// A warp takes the next unit of a counter: it asks early and looks late.
struct Tickets {
  uint32_t pending = 0;

  __device__ __forceinline__ void ask(uint32_t& counter) {
    if (lane_id() == 0) pending = ptx::atom_count_relaxed_gpu(&counter);
  }
  __device__ __forceinline__ int take() const { return static_cast<int>(__shfl_sync(~0u, pending, 0)); }
};

// A warp has finished `units`; returns what others had before. Release of what its lanes did, acquire of the others'.
__device__ __forceinline__ uint32_t count_finished(uint32_t& counter, int units) {
  uint32_t before = 0;
  __syncwarp();
  if (lane_id() == 0) {
    __threadfence();
    before = atomicAdd(&counter, static_cast<uint32_t>(units));
    __threadfence();
  }
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();
  return before;
}

// For each of several numbers of so many bits the lanes that have the same. (An SM takes some 50 cycles for each
// __match_any_sync() of its warps; these are three instructions a bit.)
template <int kCount>
__device__ __forceinline__ void find_same_lanes(const int (&number)[kCount], int bits, unsigned (&same)[kCount]) {
#pragma unroll
  for (int q = 0; q < kCount; q++) same[q] = ~0u;
#pragma unroll 1
  for (int bit = 0; bit < bits; bit++) {
#pragma unroll
    for (int q = 0; q < kCount; q++) {
      const bool is_set = (number[q] >> bit & 1) != 0;
      const unsigned lanes = __ballot_sync(~0u, is_set);
      same[q] &= is_set ? lanes : ~lanes;
    }
  }
}

__device__ __forceinline__ unsigned find_same_lanes(int number, int bits) {
  const int numbers[] = {number};
  unsigned same[1];
  find_same_lanes(numbers, bits, same);
  return same[0];
}

// Choice `lane` of an own token, as the handle has it.
struct OwnChoice {
  int32_t id = -1, row = kNoRow, slot = kNoRow;

  __device__ __forceinline__ static OwnChoice load(const HtRoutes& own, int topk, int token) {
    if (lane_id() >= topk) return {};
    const int64_t entry = static_cast<int64_t>(token) * topk + lane_id();
    return {own.ids[entry], own.rows[entry], own.slots[entry]};
  }
};

// Whose expert an own choice names; -1: nobody's, or its slot is not there, which is so in a handle that was changed.
template <class Role>
__device__ __forceinline__ int owner_of(const Role& role, int32_t id, int32_t slot) {
  if (!role.p.shape.valid(id)) return -1;
  const int rank = role.geometry.by_local_experts.divide(id);
  return role.tables.flows.has_slot(rank, slot) ? rank : -1;
}

// Choices of a token, one a lane: whose expert, and who of the lanes with the same rank comes first.
struct Group {
  int rank = -1;
  unsigned lanes = 0;  // of the same rank
  bool leads = false;

  // The first of the group's rows that fits, `row` being this lane's; kNoRow if none does.
  __device__ __forceinline__ int32_t first_fitting(int32_t row) const {
    const unsigned fitting = __ballot_sync(~0u, row >= 0) & lanes;
    const int32_t first = __shfl_sync(~0u, row, fitting != 0 ? __ffs(static_cast<int>(fitting)) - 1 : lane_id());
    return fitting != 0 ? first : kNoRow;
  }
  template <class Role>
  __device__ __forceinline__ static Group of(const Role& role, const OwnChoice& choice) {
    Group group;
    group.rank = owner_of(role, choice.id, choice.slot);
    const bool is_there = group.rank >= 0;
    group.lanes = find_same_lanes(group.rank, role.geometry.rank_bits) & __ballot_sync(~0u, is_there);
    group.leads = is_there && __ffs(static_cast<int>(group.lanes)) - 1 == lane_id();
    return group;
  }
};

}  // namespace ep
