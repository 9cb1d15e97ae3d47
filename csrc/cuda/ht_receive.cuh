// What a rank does with the rows that have come: copies for further choices or from the staging rows, zeros for rows
// that do not exist. The table of contents of the second kernel of a dispatch, ht_send(), is at the end.
#pragma once

#include "cuda/ht_routes.cuh"
#include "cuda/stamps.cuh"

namespace ep {

// ---- Rows

// A warp copies a row that another rank may have written.
static __device__ __noinline__ void copy_row(char* out, const char* in, int bytes, int lane) {
  const auto bits = static_cast<unsigned>(reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(in)) |
                    static_cast<unsigned>(bytes);
  if (bits % 16 != 0) return copy_bytes(out, in, bytes, word_bytes(bits, 8), lane);
  constexpr int kTogether = 7;
  const int chunks = bytes / 16;
  auto* to = reinterpret_cast<uint4*>(out);
  const auto* from = reinterpret_cast<const uint4*>(in);
#pragma unroll 1
  for (int first = lane; first < chunks; first += 32 * kTogether) {
    uint4 value[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (first + 32 * i < chunks) value[i] = ptx::ld_relaxed_sys(from + first + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (first + 32 * i < chunks) ptx::st(to + first + 32 * i, value[i]);
    }
  }
}

// A helper that copies by the bulk engine, if its warp has a stage.
struct Copier {
  char* stage;  // null: none
  uint32_t parity = 0;

  // From `in` through the stage to a place of each lane's own; null: to none.
  __device__ __forceinline__ void copy(const ReceiveRole& role, const char* in, char* out, int bytes) {
    if (role.lane == 0) {
      ptx::mbarrier_expect(role.barrier(), bytes);
      ptx::bulk_load(stage, in, bytes, role.barrier());
    }
    await_load(role, parity);
    if (out != nullptr) ptx::bulk_store(out, stage, bytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    __syncwarp();
  }
};

// To the rows of all lanes, kNoRow for none: from row `first` of the output where the sender has written that one in
// place, else from the staging rows.
__device__ __forceinline__ void put_rows(const ReceiveRole& role, Copier& copier, int32_t slot, int32_t row) {
  const unsigned fitting = __ballot_sync(~0u, row >= 0);
  if (fitting == 0) return;
  const int leader = __ffs(static_cast<int>(fitting)) - 1;
  const int32_t first = __shfl_sync(~0u, row, leader);
#pragma unroll 1
  for (int i = 0; i < role.p.num_parts; i++) {
    const bool is_in_place = role.p.parts[i].out_offset != kNoOffset;
    unsigned rest = is_in_place ? fitting & (fitting - 1) : fitting;
    if (rest == 0) continue;
    const int bytes = role.p.parts[i].bytes;
    const char* in = is_in_place ? role.out_row(i, first)
                                 : role.peers.local<char>(role.p.layout.staged_row(slot) + role.p.layout.row.offset[i]);
    // Rows begin at multiples of their size.
    const auto bits =
        static_cast<unsigned>(reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(role.p.parts[i].out)) |
        static_cast<unsigned>(bytes);
    if (copier.stage != nullptr && bits % 16 == 0 && bytes >= kLeastBulkBytes) {
      copier.copy(role, in, (rest >> role.lane & 1) != 0 ? role.out_row(i, row) : nullptr, bytes);
      continue;
    }
#pragma unroll 1
    for (; rest != 0; rest &= rest - 1) {
      const int32_t next = __shfl_sync(~0u, row, __ffs(static_cast<int>(rest)) - 1);
      copy_row(role.out_row(i, next), in, bytes, role.lane);
    }
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

// Expert layouts: lane k holds choice k of the slot's token.
__device__ __forceinline__ void place_choices(const ReceiveRole& role, Copier& copier, int32_t slot) {
  const HtDispatchParams& p = role.p;
  const HtSlotFormat& format = p.layout.slot;
  const int topk = p.shape.topk;
  const bool with_routes = sends_routes(p.steps);
  int32_t* kept = p.handle.slot(slot);
  int32_t row = kNoRow;
  if (with_routes) {
    const auto* words = role.peers.local<uint32_t>(p.layout.slot_words(slot));
    if (role.lane < topk) {
      row = static_cast<int32_t>(ptx::ld_relaxed_sys(words + format.place(role.lane)));
      const uint32_t weight = ptx::ld_relaxed_sys(words + format.weight(role.lane));
      kept[format.place(role.lane)] = row;
      kept[format.weight(role.lane)] = static_cast<int32_t>(weight);
      if (row >= 0) {
        p.out_weights[row] = __uint_as_float(weight);
        if (p.row_expert != nullptr) p.row_expert[row] = expert_of(role, row);
      }
    }
    if (role.lane == 0) kept[format.token()] = static_cast<int32_t>(ptx::ld_relaxed_sys(words + format.token()));
  } else if (role.lane < topk) {
    row = kept[format.place(role.lane)];
  }
  put_rows(role, copier, slot, row);
}

// Slots of a chunk of a source, dealt to the warps; `dealt` counts those of the chunks before.
__device__ __forceinline__ void place_chunk(const ReceiveRole& role, Copier& copier, int source, int begin, int end,
                                            int& dealt) {
  const int warps = role.warps();
  int index = begin + (role.receiver() - dealt % warps + warps) % warps;
  dealt += end - begin;
#pragma unroll 1
  for (; index < end; index += warps) {
    testing_point(Point::kBetweenRows, role.call, index);
    const int32_t slot = role.tables.flows.from_first[source] + index;
    if (has_expert_rows(role.p.output.layout)) {
      place_choices(role, copier, slot);
    } else {
      const int32_t row = role.p.output.row(source, role.tables.flows.from_first[source], index);
      put_rows(role, copier, slot, role.lane == 0 ? row : kNoRow);
    }
  }
}

__device__ __forceinline__ bool await_rows(const ReceiveRole& role, int source, int chunk) {
  bool ok = true;
  if (has_bug(Bug::kTornRows, Kind::kDispatch)) chunk = 0;
  if (role.lane == 0) {
    ok = await_signal(role.call, role.p.layout, role.peers, HtSignal::kDispatchRows, source, chunk, Phase::kRows);
  }
  ok = __all_sync(~0u, ok);
  __syncwarp();
  ptx::fence_proxy_async();  // for bulk copies of what has come
  return ok;
}

// False: a wait was given up.
__device__ __forceinline__ bool place_rows(const ReceiveRole& role) {
  const int chunks = role.plan.chunks, ranks = role.num_ranks();
  int dealt = 0;
  Copier copier{role.warp < role.geometry.stages ? role.stage : nullptr};
  testing_point(Point::kBeforeReceive, role.call);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk++) {
#pragma unroll 1
    for (int step = 0; step < ranks; step++) {
      const int source = (role.peers.rank + step) % ranks, count = role.tables.flows.from[source];
      const int begin = chunk_begin(chunk, count, chunks), end = chunk_begin(chunk + 1, count, chunks);
      if (begin == end) continue;
      if (!await_rows(role, source, chunk)) {
        ptx::bulk_wait<0>();
        return false;
      }
      if (role.geometry.has_copies(role.p.output.layout)) place_chunk(role, copier, source, begin, end, dealt);
    }
  }
  ptx::bulk_wait<0>();
  return true;
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
  if (sends_routes(p.steps)) {
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
    return clear_rows(role, min(rows, output.capacity), output.capacity, p.zero_padding);
  }
#pragma unroll 1
  for (int bin = 0; bin < output.bins(); bin++) {
    if (output.layout == OutputLayout::kPacked) {
      const int64_t start = min(static_cast<int64_t>(role.tables.start[bin]), output.capacity);
      const int64_t next = bin + 1 < output.bins() ? role.tables.start[bin + 1] : output.capacity;
      const int64_t filled = start + output.kept(start, p.handle.expert_counts[bin]);
      clear_rows(role, filled, min(next, output.capacity), p.zero_padding);
    } else {
      const bool expert_rows = has_expert_rows(output.layout);
      const int64_t limit = expert_rows ? output.capacity : p.shape.max_tokens;
      const int demand = expert_rows ? p.handle.expert_counts[bin] : role.tables.flows.from[bin];
      clear_rows(role, bin * limit + output.kept(0, demand), (bin + 1) * limit, p.zero_padding);
    }
  }
}

// The call has failed: nothing was received.
__device__ __forceinline__ void clear_all(const ReceiveRole& role) {
  const int receivers = role.plan.helpers() * 32, receiver = (role.warp - role.plan.workers) * 32 + role.lane;
  for (int i = receiver;
       role.p.info != nullptr && sends_routes(role.p.steps) && role.is_first() && i < role.p.output.info_size();
       i += receivers) {
    role.p.info[i] = 0;
  }
  clear_rows(role, 0, role.p.output.rows(), false);
}

// ---- Table of contents: the second kernel of a dispatch

template <bool kQuant>
__device__ __forceinline__ void ht_send(const KernelArgs<HtDispatchParams>& args, BlockPosition at, char* shared) {
  const HtDispatchParams& p = args.params;
  const LsaPeers& peers = args.peers;
  EP_SHARED(CallContext, call);
  HtBlock block{at};
  const bool is_worker = block.warp < args.plan.workers;
  // In a world on one GPU another rank's plan may have more warps.
  const bool helps = !is_worker && block.warp < args.plan.warps;
  const ReceiveRole role{{block, p, args.geometry, args.plan, peers, call, SendTables::of(shared, p, args.geometry),
                          shared + (block.warp < args.geometry.stages ? block.warp : 0) * args.geometry.stage_bytes}};
  stamp(Stamp::kStart, peers.rank);
  if (!open_ht_call(call, args, Kind::kDispatch, at, true)) {
    if (helps) clear_all(role);
    return;
  }
  const bool has_routed = p.steps == HtSteps::kRouteAndSend;  // in the kernel before
  if (!has_routed && block.is_first()) {
    clear_next_counters(call);
    send_call(call, p.layout, peers, HtCall::kCounts, [&](int index) { return call_word_of(p, index); });
  }
  await_records(call, p.layout, peers);
  fill_tables(role);
  if (block.is_first() && block.thread() == 0 && args.geometry.has_staged) call.state->ht_staged[0] += 1;
  if (block_has_failed(call)) {
    if (helps) clear_all(role);
    return;
  }
  stamp(Stamp::kEpochKnown, peers.rank);
  if (is_worker) send_rows<kQuant>(role);
  stamp(Stamp::kSent, peers.rank);
  if (!helps) return;
  const bool with_routes = sends_routes(p.steps);
  if (with_routes) send_routes(role);
  clear_gaps(role);
  if (with_routes && !await_routes(role)) return clear_all(role);
  if (with_routes && !has_expert_rows(p.output.layout)) store_choices(role);
  stamp(Stamp::kOwnDone, peers.rank);
  if (!place_rows(role)) return clear_all(role);
  stamp(Stamp::kEnd, peers.rank);
}

}  // namespace ep
