// The send of a combine whose rows a kernel on another stream still writes. Rows travel unweighted, each as
// soon as its counter has reached the threshold (RowSignals): in whatever order that kernel writes them.
//
// No row is loaded before its signal, and none by a load whose result may come from before it: the lane that saw the
// signal acquires, and the warp's barrier hands that on to the lanes that load the row (docs/memory_model.md).
#pragma once

#include "cuda/ll/combine/unweighted_rows.cuh"

namespace ep {
inline namespace EP_KERNELS {

// A warp looks after up to 32 tokens at a time, a lane each, of whatever home rank, and sends the rows that are there.
template <DType kIn, int kCount>
struct SignalledSender {
  static constexpr int kPieces = 8;  // under way at once

  // A lane's token.
  int home = 0, token = 0;
  uint32_t rows = 0;     // bit k: choice k has a row
  uint32_t pending = 0;  // those that are to be sent

  // Rows cannot be loaded ahead, and entries of the handle take little of the time.
  __device__ __forceinline__ void locate_first(const CombineRole&) {}
  __device__ __forceinline__ void prefetch_first(const CombineRole&) {}

  template <class Begin>
  __device__ __forceinline__ void send_all(const CombineRole& role, const WarpContext& op, const Begin& begin) {
    if (!begin()) return;
    const int senders = role.plan.sender_blocks * role.geometry.sender_warps, homes = role.p.shape.num_ranks;
    const int own = role.warp * role.plan.sender_blocks + role.at.block, end = most_tokens(role) * homes;
#pragma unroll 1
    for (int first = own; first < end; first += 32 * senders) {
      const int index = first + role.lane * senders;
      find_rows(role, op, index < end ? index : -1);
      if (!send_pending(role, op)) return;
    }
  }

 private:
  __device__ __forceinline__ static int most_tokens(const CombineRole& role) {
    int most = 0;
#pragma unroll 1
    for (int r = role.lane; r < role.p.shape.num_ranks; r += 32) most = max(most, __ldg(role.p.handle.tokens + r));
    return min(__reduce_max_sync(~0u, most), role.p.shape.max_tokens);  // of a handle that was changed
  }
  __device__ __forceinline__ static int row_of(const CombineRole& role, int home, int token, int k) {
    return __ldg(role.p.handle.rows + (home * role.p.shape.max_tokens + token) * role.geometry.map_k + k);
  }

  // The lane's token, and what its home rank must know: of which choices there are rows. index -1: none.
  __device__ __forceinline__ void find_rows(const CombineRole& role, const WarpContext& op, int index) {
    const LlCombineParams& p = role.p;
    rows = pending = 0;
    if (index >= 0) {
      token = index / p.shape.num_ranks;
      home = role.home_of(index % p.shape.num_ranks);
      bool is_any = false;
      const bool is_token = token < __ldg(p.handle.tokens + home);
#pragma unroll 1
      for (int k = 0; is_token && k < role.geometry.map_k; k++) {
        const int row = row_of(role, home, token, k);
        if (row >= role.geometry.output_rows) continue;
        is_any = is_any || row != kNoRow;
        if (row >= 0) rows |= 1u << k;
      }
      pending = rows;
      const Offset word = p.offsets.id_words<false>(op.bank, role.peers.rank, token);
      if (is_any) ptx::st_relaxed_sys(role.peers.at<uint64_t>(home, word), tagged(rows, op.tag));
    }
    __syncwarp();
  }

  // A choice of the lane's token whose row is there, or -1. `awaited`: a row that is not, if there is one.
  __device__ __forceinline__ int find_ready(const CombineRole& role, int& row, int& awaited, uint32_t& seen) const {
    const RowSignals& signals = role.p.signals;
    awaited = -1;
#pragma unroll 1
    for (uint32_t left = pending; left != 0; left &= left - 1) {
      const int k = __ffs(static_cast<int>(left)) - 1;
      row = row_of(role, home, token, k);
      if (signals.counters == nullptr) return k;
      const uint32_t* counter = signals.counter_of(row);
      seen = ptx::ld_relaxed_gpu(counter);
      if (signals.is_reached(seen)) {
        seen = ptx::ld_acquire_gpu(counter);
        if (signals.is_reached(seen)) return k;
      }
      awaited = row;
    }
    return -1;
  }

  // False: the wait was given up.
  __device__ __forceinline__ bool send_pending(const CombineRole& role, const WarpContext& op) {
    LeanWaitBudget budget;
#pragma unroll 1
    while (__any_sync(~0u, pending != 0)) {
      int row = 0, awaited = -1;
      uint32_t seen = 0;
      const int k = find_ready(role, row, awaited, seen);
      unsigned ready = __ballot_sync(~0u, k >= 0);
      __syncwarp();
      if (ready == 0) {
        if (!budget.is_due()) continue;
        const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, awaited >= 0))) - 1;
        const int late = __shfl_sync(~0u, awaited, lane);
        const RowSignals& signals = role.p.signals;
        const bool is_over = budget.poll(op, Awaited::kRowSignal, signals.expert_of(late), signals.expected(late),
                                         __shfl_sync(~0u, seen, lane));
        if (__any_sync(~0u, is_over)) return false;
        continue;
      }
      budget = {};
#pragma unroll 1
      for (; ready != 0; ready &= ready - 1) {
        const int lane = __ffs(static_cast<int>(ready)) - 1, choice = __shfl_sync(~0u, k, lane);
        const bool is_first = (__shfl_sync(~0u, rows, lane) & ((1u << choice) - 1)) == 0;
        send_row(role, op, __shfl_sync(~0u, home, lane), __shfl_sync(~0u, token, lane), choice, is_first,
                 __shfl_sync(~0u, row, lane));
      }
      if (k >= 0) pending &= ~(1u << k);
    }
    return true;
  }

  // All pieces of it.
  __device__ __forceinline__ void send_row(const CombineRole& role, const WarpContext& op, int to, int of_token, int k,
                                           bool is_first, int row) const {
    const LlCombineParams& p = role.p;
    const char* from = static_cast<const char*>(p.rows) + static_cast<int64_t>(row) * role.geometry.row_bytes;
    char* slot =
        role.peers.at<char>(to, p.offsets.unweighted_row<false>(op.bank, role.peers.rank, of_token, k, is_first, 0));
    const int lanes = p.hidden / kCount;
    testing_point(Point::kBetweenRows, op, of_token);
#pragma unroll 1
    for (int first = role.lane; first < lanes; first += 32 * kPieces) {
      Numbers<kIn, kCount> numbers[kPieces];
#pragma unroll
      for (int q = 0; q < kPieces; q++) {
        if (first + 32 * q < lanes) numbers[q].load_relaxed_sys(from, first + 32 * q);
      }
#pragma unroll
      for (int q = 0; q < kPieces; q++) {
        if (first + 32 * q >= lanes) break;
        numbers[q].escape();
        numbers[q].store_remote(slot, first + 32 * q);
      }
    }
  }
};

// In the place of a receiver: such a kernel has none.
struct NoReceiver {
  __device__ void locate_first(const CombineRole&) {}
  __device__ void prefetch_first(const CombineRole&) {}
  template <class Begin>
  __device__ void sum_all(const CombineRole&, const WarpContext&, const Begin&) {}
};

}  // namespace EP_KERNELS
}  // namespace ep
