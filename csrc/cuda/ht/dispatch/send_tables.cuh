// What a block of a dispatch's second kernel knows before rows move: from the op messages if the kernel before still
// computes places, else from the handle.
#pragma once

#include "cuda/device/scans.cuh"
#include "cuda/ht/common/geometry.h"
#include "cuda/ht/common/messages.cuh"
#include "cuda/ht/common/tables.cuh"

namespace ep {
inline namespace EP_KERNELS {

constexpr uint32_t kGivenUp = ~0u;

// What a block keeps in shared memory besides the stages.
struct SendTables {
  uint64_t* barriers;  // of each warp; only workers wait
  Offset* offsets;     // [R, kHtMaxParts] of outputs at the receivers
  Flows flows;
  int* chunks;         // [R] chunks in which each rank wants its rows to be announced
  int *layout, *rows;  // [R] of each receiver's output
  int* start;          // [L + 1] first row of each expert here, packed outputs
  uint32_t*
      chunks_here;  // [R + 1] of each source's rows, chunks that have come; last: all have. kGivenUp: no more will
  int* segments;    // [chunks * R + 1] slots here before (chunk, source) whose rows may have to be copied

  __device__ static SendTables of(char* shared, const HtDispatchParams& p, const HtSendGeometry& g) {
    const int ranks = p.shape.num_ranks;
    SharedTables tables{shared + g.tables_at};
    SendTables t;
    t.barriers = tables.take<uint64_t>(HtSendGeometry::kBarriers);
    t.offsets = tables.take<Offset>(ranks * kHtMaxParts);
    t.flows = Flows::of(tables, ranks);
    t.chunks = tables.take<int>(ranks);
    t.layout = tables.take<int>(ranks);
    t.rows = tables.take<int>(ranks);
    t.start = tables.take<int>(p.output.local_experts + 1);
    t.chunks_here = tables.take<uint32_t>(ranks + 1);
    t.segments = tables.take<int>(kHtChunks * ranks + 1);
    return t;
  }
};

struct SendRole : HtBlock {
  const HtDispatchParams& p;
  const HtSendGeometry& geometry;
  const HtPlan& plan;
  const LsaPeers& peers;
  const OpContext& op;
  SendTables tables;
  char* stage;  // of this worker
  HtRailPart part;

  __device__ int num_ranks() const { return p.shape.num_ranks; }
  // The kernel before belongs to the operation, and may still run.
  __device__ bool routes_meanwhile() const { return p.variant == HtVariant::kRouteAndSend; }
  __device__ uint64_t* barrier() const { return tables.barriers + warp; }
  // Segments are in the order (chunk, source); the own rank's rows come first.
  __device__ int source_of(int segment) const { return (peers.rank + segment % num_ranks()) % num_ranks(); }
  __device__ char* out_row(int part, int32_t row) const {
    return static_cast<char*>(p.parts[part].out) + static_cast<int64_t>(row) * p.parts[part].bytes;
  }
  // Between domains: who delivers a row to a rank of another one.
  __device__ int owner_elsewhere([[maybe_unused]] int rank) const {
#if defined(EP_NETWORK)
    return part.rail.peer(part.rail.domain_of(rank));
#else
    return -1;
#endif
  }
  // Own rows, wherever the output lies; others' if that is the arena.
  __device__ bool is_in_place(int part, int source) const {
    return source == peers.rank || p.parts[part].out_offset != kNoOffset;
  }
};

// ---- Tables

// What ranks have said of their outputs. Here and in fill_counts() all words are loaded at the same time, by different
// warps as far as there are.
__device__ __forceinline__ void fill_outputs(const SendRole& role) {
  const HtDispatchParams& p = role.p;
  const SendTables& t = role.tables;
  const int ranks = role.num_ranks();
  auto* halves = reinterpret_cast<uint32_t*>(t.offsets);  // low word first
  const int per_rank = 2 * p.num_parts, middle = role.threads() / 2;
#pragma unroll 1
  for (int i = (role.thread() + middle) % role.threads(); i < ranks * per_rank; i += role.threads()) {
    const int source = i / per_rank, half = i % per_rank;
    halves[source * 2 * kHtMaxParts + half] =
        await_message_word(role.op, p.offsets, role.peers, source, HtMessage::kOffsets + half);
  }
#pragma unroll 1
  for (int r = role.warp; r < ranks; r += role.threads() / 32) {
    // Lane i loads the message's word i.
    static_assert(HtMessage::kChunks < 32 && HtMessage::kLayout < 32 && HtMessage::kCapacity < 32);
    const uint32_t mine =
        await_message_word(role.op, p.offsets, role.peers, r, min(role.lane, int{HtMessage::kChunks}));
    OutputShape output = p.output;
    output.layout = static_cast<OutputLayout>(__shfl_sync(~0u, mine, HtMessage::kLayout));
    output.capacity = __shfl_sync(~0u, mine, HtMessage::kCapacity);
    const uint32_t chunks = __shfl_sync(~0u, mine, HtMessage::kChunks);
    if (role.lane != 0) continue;
    t.chunks[r] = static_cast<int>(chunks);
    t.layout[r] = static_cast<int>(output.layout);
    t.rows[r] = static_cast<int>(output.rows());
    t.chunks_here[r] = 0;
  }
  if (role.thread() == 0) t.chunks_here[ranks] = 0;
}

// Tokens between ranks; of a packed output, choices of the experts here, in tables.start for now.
__device__ __forceinline__ void fill_counts(const SendRole& role) {
  const HtDispatchParams& p = role.p;
  const int ranks = role.num_ranks(), local_experts = p.output.local_experts, warps = role.threads() / 32;
  const auto count_of = [&](int source, int receiver) {
    if (!role.routes_meanwhile()) return count_in_handle(p, source, receiver);
    return static_cast<int>(await_message_word(role.op, p.offsets, role.peers, source, HtMessage::kCounts + receiver));
  };
#pragma unroll 1
  for (int r = warps - 1 - role.warp; r < ranks; r += warps) {
    role.tables.flows.fill(ranks, role.peers, r, count_of);
  }
  if (p.output.layout != OutputLayout::kPacked) return;
  const int first_word = HtMessage::kCounts + ranks + role.peers.rank * local_experts;
  const int64_t most = static_cast<int64_t>(ranks) * p.shape.max_tokens * p.shape.topk;
#pragma unroll 1
  for (int e = role.thread(); e < local_experts; e += role.threads()) {
    role.tables.start[e] = role.routes_meanwhile() ? WordSums::await(role.op, p.offsets, role.peers, first_word + e).all
                                                   : within(p.handle.expert_counts[e], most);
  }
}

// A warp: the first row of each packed expert, and the end.
__device__ __forceinline__ void find_own_starts(const SendRole& role) {
  OutputShape output = role.p.output;
  if (role.p.variant == HtVariant::kCached) output.alignment = max(*role.p.handle.alignment, 1);  // no message has it
  const auto span_of = [&](int e) { return static_cast<int>(output.span(role.tables.start[e])); };
  const int end = exclusive_sums(output.local_experts, role.tables.start, span_of);
  if (role.lane == 0) role.tables.start[output.local_experts] = end;
}

// A warp.
__device__ __forceinline__ void find_segments(const SendRole& role) {
  const int ranks = role.num_ranks(), chunks = role.plan.chunks, count = chunks * ranks;
  const bool copies_own = has_expert_rows(role.p.output.layout);  // for other choices
  const int end = exclusive_sums(count, role.tables.segments, [&](int i) {
    const int source = role.source_of(i);
    return source != role.peers.rank || copies_own ? chunk_size(i / ranks, role.tables.flows.from[source], chunks) : 0;
  });
  if (role.lane == 0) role.tables.segments[count] = end;
}

// All threads of a block, which come to a barrier before they use the tables.
__device__ __forceinline__ void prepare(const SendRole& role) {
  fill_outputs(role);
  fill_counts(role);
  __syncthreads();
  const int last_warp = role.threads() / 32 - 1;
  if (role.warp == max(last_warp - 1, 0)) find_segments(role);
  if (role.warp == last_warp && role.p.output.layout == OutputLayout::kPacked) find_own_starts(role);
}

}  // namespace EP_KERNELS
}  // namespace ep
