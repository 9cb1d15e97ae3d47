// What a rank does with the rows that have come: copies for other choices or from the staging rows, zeros for rows that
// do not exist, the info tensor. ht_send() in dispatch.cuh calls it.
#pragma once

#include "cuda/device/arrivals.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/ht/common/signals.cuh"
#include "cuda/ht/common/work.cuh"
#include "cuda/ht/dispatch/info.cuh"
#include "cuda/ht/dispatch/receive_role.cuh"
#include "cuda/protocol/ids.cuh"

namespace ep {
inline namespace EP_KERNELS {

// ---- Rows

// Lanes whose row a copy goes to; `row`: of each lane.
struct CopyTargets {
  int32_t row;
  unsigned lanes;

  template <class Store>
  __device__ __forceinline__ void for_each(const Store& store) const {
#pragma unroll 1
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
      store(__shfl_sync(~0u, row, __ffs(static_cast<int>(rest)) - 1));
    }
  }
};

// A warp reads a row once, which another rank may have written, and writes it to all targets. It does not use the bulk
// engine, which moved less while rows of other ranks came in.
__device__ __forceinline__ void copy_part(const ReceiveRole& role, int part, const char* in,
                                          const CopyTargets& targets) {
  constexpr int kBatchSize = 7;
  const int bytes = role.p.parts[part].bytes;
  const auto bits =
      static_cast<unsigned>(reinterpret_cast<uintptr_t>(role.p.parts[part].out) | reinterpret_cast<uintptr_t>(in)) |
      static_cast<unsigned>(bytes);  // rows begin at multiples of their size
  if (bits % 16 != 0) {
    targets.for_each(
        [&](int32_t row) { copy_bytes(role.out_row(part, row), in, bytes, word_bytes(bits, 8), role.lane); });
    return;
  }
  const int chunks = bytes / 16;
  const auto* from = reinterpret_cast<const uint4*>(in);
#pragma unroll 1
  for (int first = role.lane; first - role.lane < chunks; first += 32 * kBatchSize) {
    uint4 value[kBatchSize];
#pragma unroll
    for (int i = 0; i < kBatchSize; i++) value[i] = ptx::ld_relaxed_sys(from + min(first + 32 * i, chunks - 1));
    targets.for_each([&](int32_t row) {
      auto* to = reinterpret_cast<uint4*>(role.out_row(part, row));
#pragma unroll
      for (int i = 0; i < kBatchSize; i++) {
        if (first + 32 * i < chunks) ptx::st(to + first + 32 * i, value[i]);
      }
    });
  }
}

// To the rows of all lanes, kNoRow for none: from the first of them where the sender has written that one in place,
// else from the staging rows.
__device__ __forceinline__ void put_rows(const ReceiveRole& role, int source, int32_t slot, int32_t row) {
  const unsigned fitting = __ballot_sync(~0u, row >= 0);
  if (fitting == 0) return;
  const int32_t first = __shfl_sync(~0u, row, __ffs(static_cast<int>(fitting)) - 1);
#pragma unroll 1
  for (int i = 0; i < role.p.num_parts; i++) {
    const bool is_in_place = role.is_in_place(i, source);
    const char* in = is_in_place
                         ? role.out_row(i, first)
                         : role.peers.local<char>(role.p.offsets.staged_row(slot) + role.p.offsets.row.offset[i]);
    const unsigned lanes = is_in_place ? fitting & (fitting - 1) : fitting;
    if (lanes != 0) copy_part(role, i, in, {row, lanes});
  }
}

// The expert of a packed row.
__device__ __forceinline__ int expert_of(const ReceiveRole& role, int32_t row) {
  int low = 0, high = role.p.output.local_experts;  // start[low] <= row < start[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (role.tables.start[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A warp waits for the rows of all sources, a lane a source. False: a wait was given up.
__device__ __forceinline__ bool watch_rows(const ReceiveRole& role) {
  const int chunks = role.plan.chunks, ranks = role.num_ranks();
  const bool tells = role.watches() && !testing_without_flags();
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk++) {
#pragma unroll 1
    for (int first = 0; first < ranks; first += 32) {
      const int source = first + role.lane;
      bool ok = true;
      if (source < ranks && chunk_size(chunk, role.tables.flows.from[source], chunks) > 0) {
        ok = await_signal(role.op, role.p.offsets, role.peers, HtSignal::kDispatchRows, source, chunk, Awaited::kRows);
      }
      ok = __all_sync(~0u, ok);
      __syncwarp();
      if (!ok) return false;
      if (tells && source < ranks) ptx::st_release_shared(role.tables.chunks_here + source, chunk + 1);
    }
  }
  if (tells && role.lane == 0) ptx::st_release_shared(role.tables.chunks_here + ranks, 1);
  return true;
}

// Acquire. False: the warp that watches has given up.
__device__ __forceinline__ bool await_watcher(const ReceiveRole& role, int index, uint32_t chunks) {
  if (testing_without_flags()) return watch_rows(role);  // all of them
  uint32_t here;
  do {
    here = ptx::ld_acquire_shared(role.tables.chunks_here + index);
  } while (here < chunks);
  const bool ok = __all_sync(~0u, here != kGivenUp) != 0;
  __syncwarp();
  return ok;
}

// Where a unit of receiving lies: the slots that may have copies in the order in which their rows are announced.
struct PlacedUnit {
  int chunk = 0, source = 0;
  int index = 0;  // among the slots of the source

  __device__ __forceinline__ static PlacedUnit of(const ReceiveRole& role, int unit) {
    const int ranks = role.num_ranks(), chunks = role.plan.chunks;
    const int segment = segment_of(role.tables.segments, chunks * ranks, unit);
    PlacedUnit found;
    found.chunk = segment / ranks;
    found.source = role.source_of(segment);
    const int first = chunk_begin(found.chunk, role.tables.flows.from[found.source], chunks);
    found.index = first + unit - role.tables.segments[segment];
    return found;
  }
};

// A slot, and the metadata that its sender has stored there, loaded ahead.
struct PlacedSlot {
  PlacedUnit at;
  int32_t slot;
  int32_t row;  // of the lane's choice; rank layouts: of lane 0
  uint32_t weight = 0;
  int32_t token = 0;

  __device__ __forceinline__ static PlacedSlot load(const ReceiveRole& role, int unit) {
    const HtDispatchParams& p = role.p;
    const HtSlotFormat& format = p.offsets.slot;
    const int k = min(role.lane, p.shape.topk - 1);
    PlacedSlot found;
    found.at = PlacedUnit::of(role, unit);
    const int first = role.tables.flows.from_first[found.at.source];
    found.slot = first + found.at.index;
    if (!has_expert_rows(p.output.layout)) {
      found.row = p.output.row(found.at.source, first, found.at.index);
    } else if (!role.keeps_slots()) {
      const auto* words = role.peers.local<uint32_t>(p.offsets.slot_words(found.slot));
      found.row = static_cast<int32_t>(ptx::ld_relaxed_sys(words + format.place(k)));
      found.weight = ptx::ld_relaxed_sys(words + format.weight(k));
      found.token = static_cast<int32_t>(ptx::ld_relaxed_sys(words + format.token()));
    } else {
      // For a slot that does not exist, in a handle that was changed, those of another slot: see put().
      found.row = p.handle.slot(min(found.slot, static_cast<int>(p.handle.num_slots) - 1))[format.place(k)];
    }
    return found;
  }
  __device__ __forceinline__ void put(const ReceiveRole& role) const {
    const HtDispatchParams& p = role.p;
    const int lanes = has_expert_rows(p.output.layout) ? p.shape.topk : 1;
    // Past the slots or the output: in a handle that was changed.
    const bool has_slot = !role.keeps_slots() || slot < p.handle.num_slots;
    const int32_t place = has_slot && role.lane < lanes && row < p.output.rows() ? row : kNoRow;
    put_rows(role, at.source, slot, place);
    if (p.arrivals.state != nullptr) count_rows_arrived(p, place);
  }
  // Metadata goes to the handle and the outputs.
  __device__ __forceinline__ void keep(const ReceiveRole& role) const {
    const HtDispatchParams& p = role.p;
    const HtSlotFormat& format = p.offsets.slot;
    if (!has_expert_rows(p.output.layout) || !sends_metadata(p.variant)) return;
    int32_t* kept = p.handle.slot(slot);
    if (role.lane == 0) kept[format.token()] = token;
    if (role.lane >= p.shape.topk) return;
    kept[format.place(role.lane)] = row;
    kept[format.weight(role.lane)] = static_cast<int32_t>(weight);
    if (row < 0) return;
    p.out_weights[row] = __uint_as_float(weight);
    if (p.row_expert != nullptr) p.row_expert[row] = expert_of(role, row);
  }

  // False: the wait was given up.
  __device__ __forceinline__ bool await(const ReceiveRole& role) const {
    return await_watcher(role, at.source, has_bug(Bug::kTornRows, Kind::kDispatch) ? 1 : at.chunk + 1);
  }
};

// Copies for other choices, or from the staging rows. A warp's first two slots are fixed, so that slots of a chunk lie
// on different SMs. The others go to warps that are ready, as SMs that share a path to memory are slower. All of a
// warp's next slot is loaded ahead. False: a wait was given up.
__device__ __forceinline__ bool copy_rows(const ReceiveRole& role) {
  const bool has_slots = !role.keeps_slots() || role.p.handle.num_slots > 0;
  const int units = role.has_copies() && has_slots ? role.tables.segments[role.plan.chunks * role.num_ranks()] : 0;
  const int warps = role.warps() - role.helper_blocks();  // but those that watch
  int unit = role.receiver(), next_unit = unit + warps;
  Tickets tickets;
  PlacedSlot next;
  if (!kCrossesDomains && unit < units) next = PlacedSlot::load(role, unit);
#pragma unroll 1
  while (unit < units) {
    testing_point(Point::kBetweenRows, role.op, unit);
    PlacedSlot slot = next;
    if constexpr (kCrossesDomains) {  // metadata of other domains' rows comes with them
      slot.at = PlacedUnit::of(role, unit);
      if (!slot.await(role)) return false;
      slot = PlacedSlot::load(role, unit);
    } else {
      next = PlacedSlot::load(role, min(next_unit, units - 1));
      if (!slot.await(role)) return false;
    }
    tickets.prefetch(counters_of(role.op).staged);
    slot.keep(role);
    slot.put(role);
    unit = next_unit;
    next_unit = 2 * warps + tickets.next();
  }
  return await_watcher(role, role.num_ranks(), 1);
}

// False: a wait was given up.
template <bool kCopies>
__device__ __forceinline__ bool place_rows(const ReceiveRole& role) {
  testing_point(Point::kBeforeReceive, role.op);
  if (role.watches()) return watch_rows(role);
  if constexpr (kCopies) {
    return copy_rows(role);
  } else {
    return await_watcher(role, role.num_ranks(), 1);
  }
}

// ---- The info tensor

// One warp of the rank.
static __device__ __noinline__ void store_info(const HtDispatchParams& p, const OpContext& op,
                                               const SendTables tables) {
  const int* demand = has_expert_rows(p.output.layout) ? p.handle.expert_counts : tables.flows.from;
  const int* start = p.output.layout == OutputLayout::kPacked ? tables.start : tables.flows.from_first;
  store_info(
      p.output, p.info, op, [&](int bin) { return demand[bin]; }, [&](int bin) { return start[bin]; });
}

// ---- Arrivals

// One warp of the rank: how many rows of each block are to come.
__device__ __forceinline__ void plan_arrivals(const ReceiveRole& role) {
  const HtDispatchParams& p = role.p;
  const OutputShape& output = p.output;
  if (p.arrivals.state == nullptr) return;
  const bool is_packed = output.layout == OutputLayout::kPacked;
  int blocks = 0;
#pragma unroll 1
  for (int e = role.lane; e < output.local_experts; e += 32) {
    const int start = is_packed ? role.tables.start[e] : 0, next = is_packed ? role.tables.start[e + 1] : 0;
    const auto kept = static_cast<int>(output.kept(start, max(p.handle.expert_counts[e], 0)));
    blocks += plan_expert(p.arrivals, output, e, start, next, kept, 1);
    if (e + 1 == output.local_experts) plan_rest(p.arrivals, output, next);
  }
  __threadfence();
  __syncwarp();
  blocks = __reduce_add_sync(~0u, blocks);
  if (role.lane == 0) announce_plan(p.arrivals, blocks);
  __syncwarp();
}

// ---- Rows that do not exist

static __device__ __noinline__ void zero_row(const ReceiveRole& role, int32_t row) {
  for (int i = 0; i < role.p.num_parts; i++) {
    char* out = role.out_row(i, row);
    const int bytes = role.p.parts[i].bytes;
    const auto bits = static_cast<unsigned>(reinterpret_cast<uintptr_t>(out)) | static_cast<unsigned>(bytes);
    if (bits % 16 != 0) {
      for (int b = role.lane; b < bytes; b += 32) out[b] = 0;
    } else {
      for (int c = role.lane; c < bytes / 16; c += 32)
        ptx::st(reinterpret_cast<uint4*>(out) + c, make_uint4(0, 0, 0, 0));
    }
  }
}

// Rows [first, end) do not exist.
__device__ __forceinline__ void clear_rows(const ReceiveRole& role, int64_t first, int64_t end, bool zero_padding) {
  const HtDispatchParams& p = role.p;
  const int threads = role.warps() * 32, thread = role.receiver() * 32 + role.lane;
  if (sends_metadata(p.variant)) {
#pragma unroll 1
    for (int64_t row = first + thread; row < end; row += threads) {
      clear_entry(p, has_expert_rows(p.output.layout), row);
    }
  }
  if (!zero_padding) return;
#pragma unroll 1
  for (int64_t row = first + role.receiver(); row < end; row += role.warps()) zero_row(role, static_cast<int32_t>(row));
}

__device__ __forceinline__ void clear_gaps(const ReceiveRole& role) {
  const HtDispatchParams& p = role.p;
  const OutputShape& output = p.output;
  const int last = role.num_ranks() - 1;
  if (output.layout == OutputLayout::kFlat) {
    const int64_t rows = role.tables.flows.from_first[last] + role.tables.flows.from[last];
    return clear_rows(role, min(rows, output.capacity), output.capacity, p.options.zero_padding);
  }
#pragma unroll 1
  for (int bin = 0; bin < output.bins(); bin++) {
    if (output.layout == OutputLayout::kPacked) {
      const int64_t start = within(role.tables.start[bin], output.capacity);
      const int64_t next = bin + 1 < output.bins() ? role.tables.start[bin + 1] : output.capacity;
      const int64_t filled = start + output.kept(start, max(p.handle.expert_counts[bin], 0));
      clear_rows(role, filled, min(next, output.capacity), p.options.zero_padding);
    } else {
      const bool expert_rows = has_expert_rows(output.layout);
      const int64_t limit = expert_rows ? output.capacity : p.shape.max_tokens;
      const int demand = expert_rows ? max(p.handle.expert_counts[bin], 0) : role.tables.flows.from[bin];
      clear_rows(role, bin * limit + output.kept(0, demand), (bin + 1) * limit, p.options.zero_padding);
    }
  }
}

// The operation has failed: nothing was received.
static __device__ __noinline__ void clear_all(const ReceiveRole role) {
  tell_failure(role.p.arrivals);
  // By the warp that has given up, as others may not have.
  if (role.p.info != nullptr && sends_metadata(role.p.variant)) clear_info(role.p.output, role.p.info);
  clear_rows(role, 0, role.p.output.rows(), false);
}

// A helper has given up a wait. Warps that wait for this one must not go on waiting.
__device__ __forceinline__ void give_up(const ReceiveRole& role) {
#pragma unroll 1
  for (int i = role.lane; role.watches() && i <= role.num_ranks(); i += 32) {
    ptx::st_release_shared(role.tables.chunks_here + i, kGivenUp);
  }
  clear_all(role);
}

}  // namespace EP_KERNELS
}  // namespace ep
