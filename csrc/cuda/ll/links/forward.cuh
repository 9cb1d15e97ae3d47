// In which order a block of the rail forwards what comes: in that of its units or, with masks, as they come, because a
// rank that is gone must not keep back what others have sent.
#pragma once

#include "cuda/ll/links/links.cuh"

namespace ep {
inline namespace EP_KERNELS {

// Which units of a block are still to be forwarded. In shared memory.
class ForwardQueue {
 public:
  // All threads of a block call.
  __device__ void clear() {
    for (int i = threadIdx.x; i < kMaxUnits / 32; i += static_cast<int>(blockDim.x)) is_over_[i] = 0;
  }
  // All threads of a block call. The number of a unit of the block that has come, of `count` of all blocks, `slices` a
  // channel; -1: no more comes.
  __device__ int next(const RailRole& role, const WarpContext& op, int count, int slices, WaitBudget& budget) {
    __syncthreads();  // the unit before is done
    if (threadIdx.x == 0) next_ = find_next(role, op, count, slices, budget);
    __syncthreads();
    return next_;
  }

 private:
  static constexpr int kMaxUnits = kMaxRanks * (1 + kRowChannels);  // channels have slices where there are fewer
  static_assert(kMaxUnits % 32 == 0);

  // One thread. A unit has come with its record and its own channel; those of masked ranks are over.
  __device__ int find_next(const RailRole& role, const WarpContext& op, int count, int slices, WaitBudget& budget) {
    const auto has_come = [&](int link, int channel) {
      const ChannelWord word = ChannelWord::of(op, role.rail, link, channel);
      return word.read(role.network) >= word.expected;
    };
    while (true) {
      int late = -1;
      for (int number = role.index, i = 0; number < count; number += role.step, i++) {
        if ((is_over_[i >> 5] >> (i & 31) & 1) != 0) continue;
        const RailUnit unit = RailUnit::of(role.rail, number, slices);
        const int peer = role.rail.peer(unit.link);
        const bool is_left_out = is_masked(op, peer) || is_masked_now(op, peer);
        const bool is_there = !is_left_out && has_come(unit.link, 0) && has_come(unit.link, unit.channel);
        if (is_left_out || is_there) is_over_[i >> 5] |= 1u << (i & 31);
        if (is_there) return number;
        if (!is_left_out) late = peer;
      }
      if (late < 0) return -1;
      const uint64_t expected = LlRail::expected(op.context.epoch);
      if (budget.is_spent(op, Awaited::kRail, late, expected, 0) && op.context.has_failed()) return -1;
    }
  }

  uint32_t is_over_[kMaxUnits / 32];
  int next_;
};

// All threads of a block that forwards: calls `forward` with each of its units whose record has come, with masks also
// their own channel. `count`: units of all blocks, `slices` a channel. `forward` returns false if a wait was given up.
template <class Forward>
__device__ __forceinline__ void forward_all(const RailRole& role, const WarpContext& op, int count, int slices,
                                            Forward forward) {
  if constexpr (kMasksRanks) {
    EP_SHARED(ForwardQueue, queue);
    WaitBudget budget;
    queue.clear();
    for (int number; (number = queue.next(role, op, count, slices, budget)) >= 0;) {
      if (!forward(RailUnit::of(role.rail, number, slices))) return;
    }
  } else {
    for (int number = role.index; number < count; number += role.step) {
      const RailUnit unit = RailUnit::of(role.rail, number, slices);
      if (await_channel(role, op, unit.link, 0) != Arrival::kCame || !forward(unit)) return;
    }
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
