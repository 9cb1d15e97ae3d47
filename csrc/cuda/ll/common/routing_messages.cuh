// Routing messages: the home rank of a token sends its ids to all ranks, and a weight to the owner of its expert.
#pragma once

#include "base/math.h"
#include "cuda/device/lanes.cuh"
#include "cuda/ll/common/op_context.cuh"
#include "cuda/protocol/ids.cuh"
#include "cuda/protocol/wait.cuh"
#include "transport/device/lsa_peers.h"

namespace ep {
inline namespace EP_KERNELS {

// What a lane sends of a token's routing: a word of ids to one rank, and the weight of choice `lane` to the rank of its
// expert. Lane k holds choice k; lane i of pass n has word 32 n + i of the messages to all ranks. Targets lie in bank
// 0, so that everything is ready when the epoch comes.
struct RoutingLane {
  uint64_t* ids = nullptr;
  uint64_t* weight = nullptr;  // before fill(): where rank 0 keeps the weight of choice `lane`
  uint32_t word = 0;
  float value = 0;
  int peer, index;

  __device__ __forceinline__ static int passes(const LlOffsets& offsets) {
    return ceil_div(offsets.num_ranks * offsets.ids.words(), 32);
  }
  // The addresses of a lane's words: all that does not need the ids.
  __device__ __forceinline__ static RoutingLane at_addr(const LlOffsets& offsets, const LsaPeers& peers,
                                                        const Divisor& by_id_words, int pass, int token) {
    RoutingLane lane;
    lane.peer = by_id_words.divide(pass * 32 + lane_id());
    lane.index = by_id_words.remainder(pass * 32 + lane_id(), lane.peer);
    lane.ids =
        ptx::opaque(peers.at<uint64_t>(lane.peer, offsets.id_words<kMasksRanks>(0, peers.rank, token)) + lane.index);
    lane.weight = ptx::opaque(peers.at<uint64_t>(0, offsets.weight<kMasksRanks>(0, peers.rank, token, lane_id())));
    return lane;
  }
  __device__ __forceinline__ void fill(const LlOffsets& offsets, const LsaPeers& peers, int pass, const Choice& choice,
                                       float weight_of_choice) {
    const int per_word = offsets.ids.per_word(), bits = offsets.ids.bits;
    const uint32_t none = offsets.ids.none();
    const uint32_t mine = choice.rank < 0 ? ~0u : static_cast<uint32_t>(choice.rank << 16 | choice.expert);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (j >= per_word) break;
      const uint32_t theirs = __shfl_sync(~0u, mine, index * per_word + j);
      word |= (theirs >> 16 == static_cast<uint32_t>(peer) ? theirs & 0xFFFF : none) << j * bits;
    }
    if (peer >= offsets.num_ranks || !reaches(peers, peer)) ids = nullptr;
    value = weight_of_choice;
    weight = pass != 0 || choice.rank < 0 || !reaches(peers, choice.rank)
                 ? nullptr
                 : weight + choice.rank * (peers.stride / sizeof(uint64_t));
  }
  __device__ __forceinline__ static RoutingLane of(const LlOffsets& offsets, const LsaPeers& peers,
                                                   const Divisor& by_id_words, int pass, int token,
                                                   const Choice& choice, float weight) {
    RoutingLane lane = at_addr(offsets, peers, by_id_words, pass, token);
    lane.fill(offsets, peers, pass, choice, weight);
    return lane;
  }
  // `rank`: of the choice.
  __device__ __forceinline__ void send(const WarpContext& op, const LlOffsets& offsets, int rank) const {
    const int64_t offset = op.bank * static_cast<int64_t>(offsets.tagged_bank_bytes / sizeof(uint64_t));
    if (ids != nullptr && !is_masked(op, peer)) ptx::st_relaxed_sys(ids + offset, tagged(word, op.tag));
    if (weight != nullptr && !is_masked(op, rank)) {
      ptx::st_relaxed_sys(weight + offset, tagged(__float_as_uint(value), op.tag));
    }
  }
};

// One warp sends the routing of an own token to every rank of the domain, itself included.
__device__ __forceinline__ void send_routing(const WarpContext& op, const LlOffsets& offsets, const LsaPeers& peers,
                                             const Divisor& by_id_words, int first_pass, int token,
                                             const Choice& choice, float weight) {
#pragma unroll 1
  for (int pass = first_pass; pass < RoutingLane::passes(offsets); pass++) {
    RoutingLane::of(offsets, peers, by_id_words, pass, token, choice, weight).send(op, offsets, choice.rank);
  }
}

// DispatchOptions::all_weights: each rank that has an expert of the token gets the weights of its other choices, too.
// `own`: the rank of choice `lane`.
__device__ __forceinline__ void send_other_weights(const WarpContext& op, const LlOffsets& offsets,
                                                   const LsaPeers& peers, int topk, int token, int own, float weight) {
  const int lane = lane_id();
  for (int k = 0; k < topk; k++) {
    const int rank = __shfl_sync(~0u, own, k);
    const unsigned its_choices = __ballot_sync(~0u, own == rank);
    if (rank < 0 || __ffs(static_cast<int>(its_choices)) - 1 != k || !reaches(peers, rank)) continue;
    if (lane >= topk || own == rank || is_masked(op, rank)) continue;
    auto* word = peers.at<uint64_t>(rank, offsets.weight<kMasksRanks>(op.bank, peers.rank, token, lane));
    ptx::st_relaxed_sys(word, tagged(__float_as_uint(weight), op.tag));
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
