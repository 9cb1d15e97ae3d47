// What stands beside rows: for each slot the places and weights of its token's choices, and the token's number. The
// warps that move no rows send it while the others do, and put what has come into outputs and handle.
#pragma once

#include "cuda/ht_send.cuh"

namespace ep {

// A helper: what a block has beside workers, if it has not only those.
struct ReceiveRole : SendRole {
  // A rank of a world on one GPU may have more blocks than it asked for.
  __device__ int helper_blocks() const { return at.num_blocks - plan.senders; }
  __device__ int warps() const { return helper_blocks() * plan.helpers(); }
  __device__ int helper() const { return warp - plan.workers_of(at.block); }  // of the block
  __device__ int receiver() const { return helper() * helper_blocks() + at.block - plan.senders; }
  __device__ bool is_first_helper_block() const { return at.block == plan.senders; }
  __device__ bool has_copies() const { return geometry.has_copies(p.output.layout); }
  // Where rows are copied, the last helper of a block waits for rows, and no other warp of it looks at signals.
  __device__ bool watches() const { return has_copies() && helper() == plan.helpers() - 1; }
  __device__ char* out_row(int part, int32_t row) const {
    return static_cast<char*>(p.parts[part].out) + static_cast<int64_t>(row) * p.parts[part].bytes;
  }
};

// ---- Sending

// Lanes whose key is the same; a lane without one stands alone.
__device__ __forceinline__ unsigned same_key(bool has_key, int key) {
  return __match_any_sync(~0u, has_key ? key : static_cast<int>(0x80000000u | lane_id()));
}

// Some tokens' choices, one a lane as in for_each_step(), and what their slots shall hold.
struct RoutesStep {
  static constexpr int kTogether = 4;  // steps of a unit of work, asked for together

  OwnChoice choice;
  float weight = 1.0f;

  __device__ __forceinline__ static RoutesStep load(const HtDispatchParams& p, int token, int k) {
    const int64_t entry = static_cast<int64_t>(min(token, p.num_tokens - 1)) * p.shape.topk + k;
    const HtRoutes& own = p.handle.own;
    RoutesStep step{{own.ids[entry], own.rows[entry], own.slots[entry]}};
    if (p.topk_weights != nullptr) step.weight = __ldg(p.topk_weights + entry);
    return step;
  }

  // `turn`, `k`: of this lane; `exists`: it has a token.
  __device__ __forceinline__ void send(const ReceiveRole& role, int token, int turn, int k, bool exists) const {
    const HtDispatchParams& p = role.p;
    const HtSlotFormat& format = p.layout.slot;
    const int topk = p.shape.topk;
    const int rank = exists && choice.id >= 0 ? role.geometry.by_local_experts.divide(choice.id) : -1;
    const unsigned group = same_key(rank >= 0, turn * role.num_ranks() + rank);
    const bool leads = rank >= 0 && __ffs(static_cast<int>(group)) - 1 == role.lane;
#pragma unroll 1
    for (int other = 0; other < topk; other++) {  // of the same token
      const int from = min(turn * topk + other, 31);
      const int peer = __shfl_sync(~0u, leads ? rank : -1, from);
      const int32_t slot = __shfl_sync(~0u, choice.slot, from);
      if (!exists || peer < 0) continue;
      auto* words = role.peers.at<uint32_t>(peer, p.layout.slot_words(slot));
      const bool expert_rows = has_expert_rows(static_cast<OutputLayout>(role.tables.layout[peer]));
      int32_t place = kNoRow;
      if (rank == peer) place = expert_rows ? choice.row : choice.id - peer * p.shape.local_experts();
      ptx::st_relaxed_sys(words + format.place(k), static_cast<uint32_t>(place));
      ptx::st_relaxed_sys(words + format.weight(k), rank == peer ? __float_as_uint(weight) : 0u);
      if (k == 0) ptx::st_relaxed_sys(words + format.token(), static_cast<uint32_t>(token));
    }
  }
};

// To the slots at the receivers. The helper that finishes the last unit tells them.
__device__ __forceinline__ void send_routes(const ReceiveRole& role) {
  constexpr int kTogether = RoutesStep::kTogether;
  const HtDispatchParams& p = role.p;
  const int step_tokens = 32 / p.shape.topk, units = ceil_div(p.num_tokens, step_tokens * kTogether);
  const int turn = role.geometry.by_topk.divide(role.lane), k = role.geometry.by_topk.remainder(role.lane, turn);
  HtCounters& counters = counters_of(role.call);
  Tickets tickets;
  tickets.ask(counters.routes_taken);
  int unit = tickets.take(), done = 0;
#pragma unroll 1
  while (unit < units) {
    testing_point(Point::kBetweenRows, role.call, unit);
    tickets.ask(counters.routes_taken);
    const int first = unit * kTogether * step_tokens + turn;
    RoutesStep steps[kTogether];
#pragma unroll
    for (int s = 0; s < kTogether; s++) steps[s] = RoutesStep::load(p, first + s * step_tokens, k);
#pragma unroll
    for (int s = 0; s < kTogether; s++) {
      const int token = first + s * step_tokens;
      steps[s].send(role, token, turn, k, turn < step_tokens && token < p.num_tokens);
    }
    unit = tickets.take();
    done++;
  }
  if (done == 0) return;
  const uint32_t before = count_finished(counters.routes_finished, done);
  if (before + done != static_cast<uint32_t>(units)) return;
#pragma unroll 1
  for (int peer = role.lane; peer < role.num_ranks(); peer += 32) {
    if (role.tables.flows.to[peer] == 0) continue;
    send_signal(role.call, p.layout, role.peers, peer, HtSignal::kDispatchRoutes, 0);
  }
}

// ---- Receiving

// False: a wait was given up.
__device__ __forceinline__ bool await_routes(const ReceiveRole& role) {
  bool ok = true;
#pragma unroll 1
  for (int source = role.lane; source < role.num_ranks(); source += 32) {
    if (role.tables.flows.from[source] == 0) continue;
    ok =
        await_signal(role.call, role.p.layout, role.peers, HtSignal::kDispatchRoutes, source, 0, Phase::kRouting) && ok;
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

// Rank layouts: a thread takes choices of slots, several asked for together.
__device__ __forceinline__ void store_choices(const ReceiveRole& role) {
  constexpr int kTogether = 8;
  const HtDispatchParams& p = role.p;
  const HtSlotFormat& format = p.layout.slot;
  const int topk = p.shape.topk, threads = role.warps() * 32, thread = role.receiver() * 32 + role.lane;
  const int last = role.num_ranks() - 1, slots = role.tables.flows.from_first[last] + role.tables.flows.from[last];
  const auto words_of = [&](int slot) { return role.peers.local<uint32_t>(p.layout.slot_words(slot)); };
  // A thread keeps to one k, so that slots are counted without divisions.
  const int step = threads / topk;  // slots that all threads take at a time
  const int first = role.geometry.by_topk.divide(thread), k = role.geometry.by_topk.remainder(thread, first);
#pragma unroll 1
  for (int begin = first; first < step && begin < slots; begin += kTogether * step) {
    uint32_t id[kTogether], weight[kTogether];
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      const uint32_t* words = words_of(min(begin + q * step, slots - 1));
      id[q] = ptx::ld_relaxed_sys(words + format.place(k));
      weight[q] = ptx::ld_relaxed_sys(words + format.weight(k));
    }
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
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
  for (int begin = thread; begin < kept; begin += kTogether * threads) {
    uint32_t token[kTogether];
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      token[q] = ptx::ld_relaxed_sys(words_of(min(begin + q * threads, kept - 1)) + format.token());
    }
#pragma unroll
    for (int q = 0; q < kTogether; q++) {
      if (begin + q * threads < kept) *p.handle.slot(begin + q * threads) = static_cast<int32_t>(token[q]);
    }
  }
}

}  // namespace ep
