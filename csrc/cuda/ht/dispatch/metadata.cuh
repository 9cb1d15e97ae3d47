// Metadata of rows: for each slot the places and weights of its token's choices, and the token's number. The warps that
// move no rows send it while the others do, and put what has come into outputs and handle.
#pragma once

#include "cuda/ht/common/signals.cuh"
#include "cuda/ht/common/work.cuh"
#include "cuda/ht/dispatch/receive_role.cuh"
#include "cuda/protocol/ids.cuh"

namespace ep {
inline namespace EP_KERNELS {

// ---- Sending

// Up to 32 own tokens, one a lane, as one receiver sees them: those with an expert there have consecutive slots, so
// that their words go out in whole lines.
struct RoutesUnit {
  static constexpr int kTokens = 32, kBatchSize = 4;  // lines that are made up together

  const ReceiveRole& role;
  int first = 0, peer = 0;  // tokens [first, first + kTokens)
  unsigned members = 0;     // bit i: the receiver gets token first + i
  int member = 0;           // the lane-th of them
  int32_t slot = 0;         // of the first one

  __device__ static int count(const ReceiveRole& role) {
    return ceil_div(role.p.num_tokens, kTokens) * NearRanks::of(role.peers, role.num_ranks()).size;
  }
  __device__ __forceinline__ RoutesUnit(const ReceiveRole& a_role, int unit) : role(a_role) {
    const HtDispatchParams& p = role.p;
    const int topk = p.shape.topk, group = role.geometry.by_near_ranks.divide(unit);
    first = group * kTokens;
    peer = role.peers.rank + role.geometry.by_near_ranks.remainder(unit, group);
    const NearRanks near = NearRanks::of(role.peers, role.num_ranks());
    if (peer >= near.end()) peer -= near.size;
    const int token = min(first + role.lane, p.num_tokens - 1), entry = token * topk;
    int choice = -1;  // of the token, at this receiver
#pragma unroll 1
    for (int begin = 0; begin < topk; begin += kBatchSize) {
      int32_t id[kBatchSize];
#pragma unroll
      for (int q = 0; q < kBatchSize; q++) id[q] = p.handle.own.ids[entry + min(begin + q, topk - 1)];
#pragma unroll
      for (int q = 0; q < kBatchSize; q++) choice = is_there(id[q]) ? min(begin + q, topk - 1) : choice;
    }
    const bool is_member = choice >= 0 && first + role.lane < p.num_tokens;
    members = __ballot_sync(~0u, is_member);
    if (is_member) slot = p.handle.own.slots[entry + choice];
    slot = __shfl_sync(~0u, slot, members != 0 ? __ffs(static_cast<int>(members)) - 1 : 0);
    member = nth_bit(members, role.lane);
  }
  __device__ __forceinline__ int local_expert(int32_t id) const { return id - peer * role.p.shape.local_experts(); }
  __device__ __forceinline__ bool is_there(int32_t id) const {
    return static_cast<unsigned>(local_expert(id)) < static_cast<unsigned>(role.p.shape.local_experts());
  }
  // Where the n-th bit is that is set; of fewer, anywhere.
  __device__ __forceinline__ static int nth_bit(unsigned bits, int n) {
    int at = 0;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      const int before = __popc(bits & ((1u << width) - 1));
      if (n < before) continue;
      n -= before;
      bits >>= width;
      at += width;
    }
    return at;
  }

  __device__ __forceinline__ void send() const {
    if (members == 0) return;
    const HtDispatchParams& p = role.p;
    const HtRoutes& own = p.handle.own;
    const HtSlotFormat& format = p.offsets.slot;
    const int topk = p.shape.topk, words = format.words(), end = __popc(members) * words;
    const bool expert_rows = has_expert_rows(static_cast<OutputLayout>(role.tables.layout[peer]));
    const auto* places = reinterpret_cast<const uint32_t*>(expert_rows ? own.rows : own.ids);
    const auto* weights =
        p.topk_weights != nullptr ? reinterpret_cast<const uint32_t*>(p.topk_weights) : places;  // 1 without
    auto* out = role.peers.at<uint32_t>(peer, p.offsets.slot_words(slot));
    // A store of the warp begins where a line does.
    const int skipped = static_cast<int>(reinterpret_cast<uintptr_t>(out) / sizeof(uint32_t) % 32);
#pragma unroll 1
    for (int begin = role.lane - skipped; begin - role.lane < end; begin += 32 * kBatchSize) {
      int32_t id[kBatchSize];
      uint32_t value[kBatchSize];
      int word[kBatchSize], token[kBatchSize];
#pragma unroll
      for (int q = 0; q < kBatchSize; q++) {
        const int i = min(max(begin + 32 * q, 0), end - 1), row = role.geometry.by_words.divide(i);
        word[q] = role.geometry.by_words.remainder(i, row);
        token[q] = first + __shfl_sync(~0u, member, row);
        const int k = word[q] < topk ? word[q] : min(word[q] - topk, topk - 1), entry = token[q] * topk + k;
        id[q] = own.ids[entry];
        value[q] = (word[q] < topk ? places : weights)[entry];
      }
#pragma unroll
      for (int q = 0; q < kBatchSize; q++) {
        const bool here = is_there(id[q]);
        uint32_t bits = p.topk_weights != nullptr ? value[q] : __float_as_uint(1.0f);
        if (!here) bits = 0;
        if (word[q] < topk) {
          const int place = expert_rows ? static_cast<int>(value[q]) : local_expert(id[q]);
          bits = static_cast<uint32_t>(here ? place : kNoRow);
        }
        if (word[q] == format.token()) bits = static_cast<uint32_t>(token[q]);
        const int i = begin + 32 * q;
        if (i >= 0 && i < end) ptx::st_relaxed_sys(out + i, bits);
      }
    }
  }
};

// To the slots at the receivers. The helper that finishes the last unit signals them.
__device__ __forceinline__ void send_metadata(const ReceiveRole& role) {
  const HtDispatchParams& p = role.p;
  const int units = RoutesUnit::count(role);
  HtCounters& counters = counters_of(role.op);
  Tickets tickets;
  tickets.prefetch(counters.routes_taken);
  int unit = tickets.next(), done = 0;
#pragma unroll 1
  while (unit < units) {
    testing_point(Point::kBetweenRows, role.op, unit);
    tickets.prefetch(counters.routes_taken);
    RoutesUnit(role, unit).send();
    unit = tickets.next();
    done++;
  }
  if (done == 0) return;
  const uint32_t before = count_finished(counters.routes_finished, done);
  if (before + done != static_cast<uint32_t>(units)) return;
  const NearRanks near = NearRanks::of(role.peers, role.num_ranks());
#pragma unroll 1
  for (int peer = near.first + role.lane; peer < near.end(); peer += 32) {
    if (role.tables.flows.to[peer] == 0) continue;
    send_signal(role.op, p.offsets, role.peers, peer, HtSignal::kDispatchMetadata, 0);
  }
}

// ---- Receiving

// Of sources in the own domain: others' comes with their rows. False: a wait was given up.
__device__ __forceinline__ bool await_routes(const ReceiveRole& role) {
  bool ok = true;
  const NearRanks near = NearRanks::of(role.peers, role.num_ranks());
#pragma unroll 1
  for (int source = near.first + role.lane; source < near.end(); source += 32) {
    if (role.tables.flows.from[source] == 0) continue;
    ok = await_signal(role.op, role.p.offsets, role.peers, HtSignal::kDispatchMetadata, source, 0, Awaited::kRouting) &&
         ok;
  }
  ok = __all_sync(~0u, ok);
  __syncwarp();
  return ok;
}

// Rank layouts: the row of a slot.
__device__ __forceinline__ int32_t row_of_slot(const ReceiveRole& role, int slot) {
  const OutputShape& output = role.p.output;
  if (output.layout == OutputLayout::kFlat) return output.row(0, 0, slot);
  int source = 0;
  while (source + 1 < role.num_ranks() && slot >= role.tables.flows.from_first[source + 1]) source++;
  return output.row(source, role.tables.flows.from_first[source], slot - role.tables.flows.from_first[source]);
}

// Rank layouts: a thread takes choices of slots, several loaded together.
__device__ __forceinline__ void store_choices(const ReceiveRole& role) {
  constexpr int kBatchSize = 8;
  const HtDispatchParams& p = role.p;
  const HtSlotFormat& format = p.offsets.slot;
  const int topk = p.shape.topk, threads = role.warps() * 32, thread = role.receiver() * 32 + role.lane;
  const int last = role.num_ranks() - 1, slots = role.tables.flows.from_first[last] + role.tables.flows.from[last];
  const auto words_of = [&](int slot) { return role.peers.local<uint32_t>(p.offsets.slot_words(slot)); };
  // A thread keeps to one k, so that slots are counted without divisions.
  const int step = threads / topk;  // slots that all threads take at a time
  const int first = role.geometry.by_topk.divide(thread), k = role.geometry.by_topk.remainder(thread, first);
#pragma unroll 1
  for (int begin = first; first < step && begin < slots; begin += kBatchSize * step) {
    uint32_t id[kBatchSize], weight[kBatchSize];
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) {
      const uint32_t* words = words_of(min(begin + q * step, slots - 1));
      id[q] = ptx::ld_relaxed_sys(words + format.place(k));
      weight[q] = ptx::ld_relaxed_sys(words + format.weight(k));
    }
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) {
      if (begin + q * step >= slots) break;
      const int32_t row = row_of_slot(role, begin + q * step);
      if (row < 0) continue;
      const int64_t entry = static_cast<int64_t>(row) * topk + k;
      p.out_weights[entry] = __uint_as_float(weight[q]);
      store_id(p.out_topk_idx, p.is_idx64, entry, static_cast<int32_t>(id[q]));
    }
  }
  const int kept = static_cast<int>(min(static_cast<int64_t>(slots), p.handle.num_slots));
#pragma unroll 1
  for (int begin = thread; begin < kept; begin += kBatchSize * threads) {
    uint32_t token[kBatchSize];
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) {
      token[q] = ptx::ld_relaxed_sys(words_of(min(begin + q * threads, kept - 1)) + format.token());
    }
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) {
      if (begin + q * threads < kept) *p.handle.slot(begin + q * threads) = static_cast<int32_t>(token[q]);
    }
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
