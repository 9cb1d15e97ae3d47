// What low latency's blocks of the rail have in common: how they begin, how they wait for the network, how they send.
// No block waits for one of a higher number, here or at another rank: first come those that send what is the rank's
// own, then those that forward it, then the blocks of one domain, those that send before those that receive.
#pragma once

#include "cuda/ll/common/headers.cuh"
#include "cuda/ll/common/ll_args.cuh"
#include "cuda/ll/common/op_context.cuh"
#include "cuda/ll/common/routing_messages.cuh"

namespace ep {
inline namespace EP_KERNELS {

// A block of the rail: the index-th of `step` that have the same role.
struct RailRole {
  const LlRail& rail;
  const LsaPeers& peers;
  EP_NETWORK network;
  int index, step;

  // `block`: of the launch; in front of its other blocks.
  template <class Args>
  __device__ static RailRole in_front(const Args& args, int block) {
    const LlRail& rail = args.rail;
    const bool is_sender = block < rail.send_blocks;
    return {rail, args.peers, EP_NETWORK(args.network), is_sender ? block : block - rail.send_blocks,
            is_sender ? rail.send_blocks : rail.forward_blocks};
  }
  // `peers` of the rank that a link leads to, which stores into the windows of the ranks that the own link serves.
  __device__ LsaPeers as_peer_of(int link) const {
    LsaPeers as_source = peers;
    as_source.rank = rail.peer(link);
    as_source.first = static_cast<uint16_t>(rail.first_of(rail.link));
    as_source.size = static_cast<uint16_t>(rail.link_size);
    return as_source;
  }
  __device__ int bank_of_staging(int bank, Kind kind) const { return has_bug(Bug::kOneStagingBank, kind) ? 0 : bank; }
};

// A unit of a role's work.
struct RailUnit {
  int link, channel, slice;  // channel 0 is the record

  __device__ static RailUnit of(const LlRail& rail, int number) { return of(rail, number, rail.slices); }
  // Where no channel has slices: 1.
  __device__ static RailUnit of(const LlRail& rail, int number, int slices) {
    const int whole = slices == 1 ? number : rail.by_slices.divide(number), channel = rail.by_others.divide(whole);
    return {rail.other(rail.by_others.remainder(whole, channel)), channel, number - whole * slices};
  }
  // Which pieces of the channel are this warp's: the first, and how far it is to the next.
  __device__ int first_piece() const { return slice * static_cast<int>(blockDim.x) / 32 + warp_id(); }
  __device__ static int piece_step(const LlRail& rail) { return rail.slices * static_cast<int>(blockDim.x) / 32; }
};

// The tokens of a row channel, of a rank that has `tokens`.
struct Share {
  int first, count;

  __device__ static Share of(const LlRail& rail, int tokens, int channel) {
    const int share = rail.share(tokens), first = min((channel - 1) * share, tokens);
    return {first, min(share, tokens - first)};
  }
  __device__ static int channel_of(const LlRail& rail, int tokens, int token) { return 1 + token / rail.share(tokens); }
};

// Experts of the ranks that a link serves.
struct ExpertsOfLink {
  int first, count;

  __device__ static ExpertsOfLink of(const LlRail& rail, int link, const Divisor& by_local_experts) {
    const auto local = static_cast<int>(by_local_experts.divisor);
    return {rail.first_of(link) * local, rail.link_size * local};
  }
  __device__ bool has(int64_t id) const { return static_cast<uint64_t>(id - first) < static_cast<uint64_t>(count); }
};

// Which tokens of a share have a row on the network: rows are packed in the order of tokens.
struct ShareBits {
  uint32_t words[kMaxRailShare / 32];

  __device__ void clear() {
    for (int i = threadIdx.x; i < kMaxRailShare / 32; i += static_cast<int>(blockDim.x)) words[i] = 0;
  }
  // All threads of a block call: bit i is set if one of the `entries` of token i of `count` counts.
  template <class Counts>
  __device__ __forceinline__ void mark(int count, int entries, Counts counts) {
    __syncthreads();  // the share before is done
    clear();
    __syncthreads();
    for (int i = threadIdx.x; i < count * entries; i += static_cast<int>(blockDim.x)) {
      if (counts(i)) set(i / entries);
    }
    __syncthreads();
  }
  __device__ void set(int i) { ptx::atom_or_relaxed_shared(&words[i >> 5], 1u << (i & 31)); }
  __device__ bool has(int i) const { return (words[i >> 5] >> (i & 31) & 1) != 0; }
  __device__ int count_before(int i) const {
    int count = 0;
#pragma unroll 1
    for (int w = 0; w < i >> 5; w++) count += __popc(words[w]);
    return (i & 31) == 0 ? count : count + __popc(words[i >> 5] & ((1u << (i & 31)) - 1));
  }
};

// All threads of a block of the rail begin an operation with it. `prefetch`: first loads of warps but the last. The
// ticket of the epoch takes its time: a block that sends draws it at the end, behind its posts, and one that waits for
// others at once, as it ends last.
template <class Args>
class RailOp {
 public:
  template <class Prefetch = Nothing>
  __device__ __forceinline__ RailOp(OpContext& context, WarpContext& op, const Args& args, Kind kind,
                                    bool advances_epoch, bool sends, Prefetch prefetch = {})
      : args_(args), is_late_(advances_epoch && sends) {
    ptx::launch_dependents();
    ptx::wait_for_prerequisites();
    opening_ = open_op(context, args, kind, prefetch);
    is_ok_ = begin_op(context, op, args, opening_);
    if (advances_epoch && !sends) advance();
  }
  __device__ __forceinline__ ~RailOp() {
    if (is_late_) advance();
  }
  RailOp(const RailOp&) = delete;
  RailOp& operator=(const RailOp&) = delete;

  // False: the buffer has failed.
  __device__ __forceinline__ bool is_ok() const { return is_ok_; }

 private:
  __device__ __forceinline__ void advance() const {
    advance_epoch(args_, opening_, opening_.kind, {0, args_.plan.blocks});
  }

  const Args& args_;
  const bool is_late_;
  Opening opening_;
  bool is_ok_;
};

// The signal word of a channel, and what it comes to in this operation.
struct ChannelWord {
  int context, word;
  uint64_t expected;

  __device__ __forceinline__ static ChannelWord of(const OpContext& op, const LlRail& rail, int link, int channel) {
    const bool is_one = has_bug(Bug::kOneParity, op.kind);
    return {rail.context(channel), rail.signal(is_one ? 0 : bank_of(op.epoch), link, channel),
            is_one ? op.epoch : LlRail::expected(op.epoch)};
  }
  __device__ __forceinline__ uint64_t read(const EP_NETWORK& network) const {
    return network.read_signal(context, word);
  }
};

// One thread waits for a channel of a link, for what is `awaited`. False: the wait is over without it, as the buffer
// has failed or the link's peer is masked.
__device__ __forceinline__ bool await_channel(const OpContext& context, const LlRail& rail, const EP_NETWORK& network,
                                              int link, int channel, Awaited awaited = Awaited::kRail) {
  if (has_bug(Bug::kSkippedWait, context.kind) && channel == 2) return true;
  if (is_masked(context, rail.peer(link))) return false;
  const ChannelWord word = ChannelWord::of(context, rail, link, channel);
  WaitBudget budget;
  uint64_t seen = word.read(network);
  while (seen < word.expected) {
    if (budget.is_spent(context, awaited, rail.peer(link), word.expected, seen)) return false;
    seen = word.read(network);
  }
  return true;
}

// A warp waits for it.
__device__ __forceinline__ bool await_channel_of_warp(const RailPart& role, const WarpContext& op, int link,
                                                      int channel) {
  bool is_ok = true;
  if (lane_id() == 0) is_ok = await_channel(op.context, *role.rail, EP_NETWORK(*role.network), link, channel);
  is_ok = __all_sync(~0u, is_ok);
  __syncwarp();
  return is_ok;
}

// What a block's wait for a channel has come to. A link is left out if its peer is masked.
enum class Arrival { kCame, kLeftOut, kFailed };

// All threads of a block wait for a channel.
__device__ __forceinline__ Arrival await_channel(const RailRole& role, const WarpContext& op, int link, int channel,
                                                 Awaited awaited = Awaited::kRail) {
  bool has_come = true;
  if (threadIdx.x == 0) has_come = await_channel(op.context, role.rail, role.network, link, channel, awaited);
  if (!__syncthreads_or(!has_come)) return Arrival::kCame;
  if (!kMasksRanks) return Arrival::kFailed;
  return __syncthreads_or(op.context.has_failed()) ? Arrival::kFailed : Arrival::kLeftOut;
}

// Of all links, so that nothing of a call is under way when it ends: what nobody waited for might land in a later
// one. Behind all blocks that others wait for.
template <class Args>
__device__ void await_rest(const WarpContext& op, const Args& args) {
  const EP_NETWORK network(args.network);
  const LlRail& rail = args.rail;
#pragma unroll 1
  for (int i = lane_id(); i < rail.others() * rail.row_channels; i += 32) {
    const int channel = rail.by_others.divide(i), link = rail.other(rail.by_others.remainder(i, channel));
    const bool has_come = await_channel(op.context, rail, network, link, 1 + channel);
    if (!has_come && (!kMasksRanks || op.context.has_failed())) return;
  }
}

// Whether the link's peer is masked. It is sent nothing but that, once.
__device__ __forceinline__ bool is_masked_link(const RailRole& role, const WarpContext& op, int link) {
  const int peer = role.rail.peer(link);
  if (!is_masked(op, peer)) return false;
  if constexpr (kMasksFarRanks) {
    if (threadIdx.x == 0) FarRanks::tell_mask(op, peer);
  }
  return true;
}

// One thread, behind a barrier of its block: whether this was the last slice of a channel's rows to be done. It sends
// them, as no block waits for another.
__device__ __forceinline__ bool is_last_slice(const RailRole& role, const WarpContext& op, int link, int channel) {
  if (role.rail.slices == 1) return true;
  const Kind kind = op.context.kind;
  unsigned long long* done = op.context.state->rail_slices[static_cast<int>(kind)].of(link, channel);
  const unsigned long long none = RailSliceCounters::none_of(op.context.epoch);
  __threadfence();  // pairs with the fence of the last slice, behind its own count
  atomicMax(done, none);
  const unsigned long long before = atomicAdd(done, 1ull) - none;
  return before == (has_bug(Bug::kEarlySlice, kind) ? 0u : role.rail.slices - 1u);
}

// One thread, behind a barrier: sends what is stored at `source`, or a signal alone if that is nothing. The link's peer
// is not masked.
__device__ __forceinline__ void post(const RailRole& role, const WarpContext& op, int link, int channel, Offset target,
                                     Offset source, uint64_t bytes) {
  const LlRail& rail = role.rail;
  const int parity = has_bug(Bug::kOneParity, op.context.kind) ? 0 : bank_of(op.context.epoch);
  const int signal = rail.signal(parity, rail.link, channel);
  if (kMasksRanks && !has_bug(Bug::kUncountedPosts, op.context.kind)) {
    ++*role.peers.local<uint64_t>(rail.posted_at(parity, link, channel));
  }
  if (bytes == 0) {
    role.network.signal(rail.peer(link), rail.context(channel), signal, 1);
    return;
  }
  __threadfence_system();  // pairs with the network, which reads the source: what was stored is there
  role.network.put_and_signal(rail.peer(link), rail.context(channel), target, source, bytes, signal, 1);
}

// All threads of a block have stored their part of a channel's packed rows, from token `first` on. `rows`: of all
// slices.
__device__ __forceinline__ void post_rows(const RailRole& role, const WarpContext& op, int link, int channel, int first,
                                          int rows) {
  __syncthreads();
  if (threadIdx.x != 0 || !is_last_slice(role, op, link, channel)) return;
  const LlRail& rail = role.rail;
  const Kind kind = op.context.kind;
  const Offset source = rail.row_to(role.bank_of_staging(op.bank, kind), link, first);
  post(role, op, link, channel, rail.row_from(op.bank, rail.link, first), source,
       static_cast<uint64_t>(rows) * rail.row_bytes);
  if (has_bug(Bug::kEarlySource, kind) && rows > 0) *role.peers.local<uint32_t>(source) ^= 0x55;
}

// ---- The record

// All threads of a block. `mine`: the own op header. `id` and `weight`: of choice i.
template <class Header, class Id, class Weight>
__device__ __forceinline__ void stage_record(char* record, const Header& mine, int entries, Id id, Weight weight) {
  auto* header = reinterpret_cast<uint32_t*>(record);
  auto* ids = reinterpret_cast<int32_t*>(record + RailRecord::ids_at());
  auto* weights = reinterpret_cast<uint32_t*>(record + RailRecord::weights_at(entries));
  if (threadIdx.x < OpHeader::kWords) header[threadIdx.x] = mine.word(static_cast<int>(threadIdx.x));
  for (int i = threadIdx.x; i < entries; i += static_cast<int>(blockDim.x)) {
    ids[i] = id(i);
    weights[i] = weight(i);
  }
}

// All threads of a block: the own record to every link.
template <class Header, class Id, class Weight>
__device__ __forceinline__ void send_record(const RailRole& role, const WarpContext& op, const Header& mine,
                                            int entries, Id id, Weight weight) {
  const LlRail& rail = role.rail;
  const int staging = role.bank_of_staging(op.bank, op.context.kind);
  testing_point(Point::kBeforeHeader, op);
  for (int i = 0; i < rail.others(); i++) {
    const int link = rail.other(i);
    if (is_masked_link(role, op, link) || (i > 0 && rail.record_copies == 1)) continue;
    stage_record(role.peers.local<char>(rail.own_record(staging, link)), mine, entries, id, weight);
  }
  __syncthreads();
  if (lane_id() != 0) return;
  for (int i = warp_id(); i < rail.others(); i += static_cast<int>(blockDim.x) / 32) {
    const int link = rail.other(i);
    if (is_masked(op, rail.peer(link))) continue;
    post(role, op, link, 0, rail.record_from(op.bank, rail.link), rail.own_record(staging, link),
         RailRecord::bytes(entries));
  }
}

// The record of a link's peer, once it has come.
struct IncomingRecord {
  const OpHeader* header;
  int tokens;  // of the peer
  const int32_t* ids;
  const uint32_t* weights;

  __device__ __forceinline__ static IncomingRecord of(const RailRole& role, const WarpContext& op, int link,
                                                      const Shape& shape) {
    const char* record = role.peers.local<char>(role.rail.record_from(op.bank, link));
    IncomingRecord incoming;
    incoming.header = reinterpret_cast<const OpHeader*>(record);
    const auto tokens = incoming.header->word(OpHeader::kNumTokens);
    // The same for all links, whatever lies there: warps count on it.
    incoming.tokens = __shfl_sync(~0u, static_cast<int>(min(tokens, static_cast<uint32_t>(shape.max_tokens))), 0);
    incoming.ids = reinterpret_cast<const int32_t*>(record + RailRecord::ids_at());
    incoming.weights = reinterpret_cast<const uint32_t*>(record + RailRecord::weights_at(incoming.tokens * shape.topk));
    return incoming;
  }
};

// The peer's op header to every rank that the own link serves, as if the peer had stored it there itself.
__device__ __forceinline__ void forward_header(const WarpContext& op, const LlOffsets& offsets,
                                               const LsaPeers& as_source, const IncomingRecord& record) {
  const OpHeader header = *record.header;
  for (int i = threadIdx.x; i < offsets.num_ranks * OpHeader::kWords; i += static_cast<int>(blockDim.x)) {
    HeaderLane::of(header, offsets, as_source, i).send(op, offsets, i);
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
