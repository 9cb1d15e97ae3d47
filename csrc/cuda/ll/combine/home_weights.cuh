// Weights that the home rank gives at combine, as DeepEP's callers do, and sends to the experts' ranks. Block 0 sends
// them all, because every block of a peer may wait for them; its leader warp has other things to do.
#pragma once

#include "cuda/ll/combine/rows.cuh"

namespace ep {
inline namespace EP_KERNELS {

// kUnweighted: rows travel unweighted, and the receive, which is not given the weights, finds them in the own
// window.
template <bool kUnweighted>
__device__ __forceinline__ void send_home_weight(const CombineRole& role, const WarpContext& op, int choice, int expert,
                                                 const OwnHomeWeight& weight) {
  const LlCombineParams& p = role.p;
  // A handle that was changed must not reach beyond the ranks.
  if (static_cast<unsigned>(expert) >= static_cast<unsigned>(p.shape.num_experts)) return;
  const int owner = role.geometry.by_local_experts.divide(expert);
  if (kUnweighted && owner != role.peers.rank) {
    const Offset kept = p.offsets.weight<kMasksRanks>(op.bank, role.peers.rank, 0, 0);
    ptx::st_relaxed_sys(role.peers.local<uint64_t>(kept) + choice, tagged(weight.bits(p), op.tag));
  }
  if (is_masked(op, owner) || !reaches(role.peers, owner)) return;
  const Offset first = p.offsets.weight<kMasksRanks>(op.bank, role.peers.rank, 0, 0);
  ptx::st_relaxed_sys(role.peers.at<uint64_t>(owner, first) + choice, tagged(weight.bits(p), op.tag));
}

// From choice `first` on.
template <bool kUnweighted>
static __device__ __noinline__ void send_home_weights(const CombineRole role, const OpContext& op, int first,
                                                      int step) {
  const LlCombineParams& p = role.p;
#pragma unroll 1
  for (int i = first; i < p.num_tokens * p.shape.topk; i += step) {
    OwnHomeWeight weight;
    weight.load(p, i);
    send_home_weight<kUnweighted>(role, WarpContext(op), i, __ldg(p.handle.ids + i), weight);
  }
}

// A thread's share. What it sends first is loaded before the epoch is known, as the peers' first sums wait for it.
// kHome: home ranks give weights; else there is nothing to do.
template <bool kHome, bool kUnweighted = false>
struct HomeWeights {
  static constexpr int kAhead = 2;
  bool are_sent;
  OwnHomeWeight weight[kAhead];
  int expert[kAhead];

  __device__ __forceinline__ explicit HomeWeights(const CombineRole& role)
      : are_sent(kHome && role.at.block == 0 && sends(role.p.phase) && !is_leader_warp()) {}
  __device__ __forceinline__ static int step() { return static_cast<int>(blockDim.x) - 32; }

  __device__ __forceinline__ void prefetch(const CombineRole& role) {
    if (!are_sent) return;
#pragma unroll
    for (int q = 0; q < kAhead; q++) {
      const int choice = static_cast<int>(threadIdx.x) + q * step();
      expert[q] = -1;
      if (choice >= role.p.num_tokens * role.p.shape.topk) continue;
      weight[q].load(role.p, choice);
      expert[q] = __ldg(role.p.handle.ids + choice);
    }
  }
  __device__ __forceinline__ void send(const CombineRole& role, const WarpContext& op) const {
    if (!are_sent) return;
    testing_point(Point::kBeforeRouting, op);
    const int choice = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int q = 0; q < kAhead; q++) {
      send_home_weight<kUnweighted>(role, op, choice + q * step(), expert[q], weight[q]);
    }
    const int further = choice + kAhead * step();
    if (further < role.p.num_tokens * role.p.shape.topk) send_home_weights<kUnweighted>(role, op, further, step());
    __syncwarp();
  }
};

}  // namespace EP_KERNELS
}  // namespace ep
