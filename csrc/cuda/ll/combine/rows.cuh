// The sums that low-latency combine is made of: which rows of a token lie here, and what they add up to.
#pragma once

#include "cuda/device/block_formats.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/numbers.cuh"
#include "cuda/ll/common/headers.cuh"
#include "cuda/ll/common/ll_args.cuh"
#include "cuda/ll/common/op_context.cuh"
#include "cuda/ll/common/routing_messages.cuh"
#include "cuda/protocol/ids.cuh"
#include "cuda/protocol/kernel_args.h"
#include "cuda/testing/stamps.cuh"

namespace ep {
inline namespace EP_KERNELS {

struct CombineRole : WarpRole, RailPart {
  const LlCombineParams& p;
  const LlCombineGeometry& geometry;
  const LsaPeers& peers;
  DeviceState* state;

  __device__ bool is_sender() const { return at.block < plan.sender_blocks && warp < geometry.sender_warps; }
  __device__ bool is_receiver() const {
    const auto index = static_cast<unsigned>(warp - plan.receiver_warp0);
    return at.block >= plan.receiver_block0 && index < static_cast<unsigned>(geometry.receiver_warps);
  }
  __device__ int receiver() const {
    return (warp - plan.receiver_warp0) * plan.receiver_blocks() + at.block - plan.receiver_block0;
  }
  __device__ int home_of(int index) const {
    const int home = peers.rank + geometry.home_step + index;
    if (sends_inside()) return home >= peers.first + peers.size ? home - peers.size : home;
    return home >= p.shape.num_ranks ? home - p.shape.num_ranks : home;
  }
};

// The rows of a token here: lane k holds choice k.
struct Terms {
  int32_t row;  // kNoRow, kDroppedRow, or the row to add
  float weight;
};

// Choice `lane` of a token, in the handle.
__device__ __forceinline__ int entry_of(const CombineRole& role, int home, int token) {
  return (home * role.p.shape.max_tokens + token) * role.geometry.map_k + role.lane;
}

// What this rank gives for choice `index` of its own tokens, loaded and not yet used.
struct OwnHomeWeight {
  float weight;
  RawId id{0, 0};

  __device__ __forceinline__ void load(const LlCombineParams& p, int index) {
    weight = __ldg(p.home_weights + index);
    if (p.home_topk_idx != nullptr) id = RawId::load(p.home_topk_idx, p.is_idx64, index);
  }
  // For the expert's rank: the weight, or kSkippedWeight.
  __device__ __forceinline__ uint32_t bits(const LlCombineParams& p) const {
    if (id.below(p.shape.num_experts, p.is_idx64) < 0) return kSkippedWeight;
    return escape_float(__float_as_uint(weight));
  }
};

__device__ __forceinline__ Terms with_weight(Terms terms, uint32_t bits) {
  if (bits == kSkippedWeight) {
    terms.row = kDroppedRow;
  } else {
    terms.weight = __uint_as_float(bits);
  }
  return terms;
}

// Where the handle's entries of a token lie.
struct TermsAt {
  const int32_t* row = nullptr;  // null: no such entry
  const float* weight = nullptr;

  __device__ __forceinline__ static TermsAt of(const CombineRole& role, int home, int token) {
    const int entry = entry_of(role, home, token);
    TermsAt at;
    at.row = ptx::opaque(role.p.handle.rows + entry);
    at.weight = ptx::opaque(role.p.handle.weights + entry);
    if (role.lane >= role.geometry.map_k) at.row = nullptr;
    return at;
  }
  // Loaded and not yet used: the first use waits.
  __device__ __forceinline__ Terms load(Weighting weighting) const {
    Terms terms{kNoRow, 1.0f};
    if (row == nullptr) return terms;
    terms.row = __ldg(row);
    if (weighting == Weighting::kDispatch) terms.weight = __ldg(weight);
    return terms;
  }
};

// A dispatch that failed leaves entries unwritten, and one of fewer tokens has none for the others.
__device__ __forceinline__ Terms checked(const CombineRole& role, Terms terms, bool is_token) {
  if (!is_token || terms.row >= role.geometry.output_rows) terms.row = kNoRow;
  return terms;
}

// This lane's numbers of a piece, of row 0. Lanes past the row's end have its last numbers.
template <DType kIn, int kCount>
__device__ __forceinline__ const char* lane_of_rows(const CombineRole& role, int piece) {
  const int lane_index = min(piece * 32 + role.lane, role.p.hidden / kCount - 1);
  return static_cast<const char*>(role.p.rows) + lane_index * static_cast<int>(sizeof(Numbers<kIn, kCount>));
}

// A lane's numbers of a piece of the first rows to add. More are rarer, and registers are few.
template <DType kIn, int kCount, int kNumRows = 3>
struct RowBatch {
  static constexpr int kRows = kNumRows;
  Numbers<kIn, kCount> rows[kRows];

  // `mask`: the lanes whose rows are meant. `lane`: lane_of_rows(). Where there is no row, nothing is loaded and the
  // numbers are not used: zeros instead would cost moves that wait for the loads before.
  __device__ __forceinline__ void load(const CombineRole& role, const Terms& terms, unsigned mask, const char* lane) {
    const int count = __popc(mask);
    int32_t row[kRows];
#pragma unroll
    for (int q = 0; q < kRows; q++) {
      row[q] = __shfl_sync(~0u, terms.row, __ffs(mask) - 1);
      mask &= mask - 1;
    }
#pragma unroll
    for (int q = 0; q < kRows; q++) {
      if (q >= count) break;
      rows[q].load_nc(lane + static_cast<int64_t>(row[q]) * role.geometry.row_bytes, 0);
    }
  }
  __device__ __forceinline__ void load(const CombineRole& role, const Terms& terms, const char* lane) {
    load(role, terms, __ballot_sync(~0u, terms.row >= 0), lane);
  }
};

// This rank's share of a token, one piece of it. Products and sums are rounded one by one, in the order of k. `batch`
// holds the first rows.
template <DType kIn, int kCount, int kRows>
__device__ __forceinline__ void partial_sum(const CombineRole& role, const Terms& terms, int piece,
                                            RowBatch<kIn, kCount, kRows>& batch, float (&sum)[kCount]) {
  unsigned mask = __ballot_sync(~0u, terms.row >= 0);
  const float nothing = mask == 0 ? 0.0f : kNothingYet;
#pragma unroll
  for (int i = 0; i < kCount; i++) sum[i] = nothing;
#pragma unroll 1
  while (mask != 0) {
    const int count = __popc(mask);
    float weight[batch.kRows];
#pragma unroll
    for (int q = 0; q < batch.kRows; q++) {
      weight[q] = __shfl_sync(~0u, terms.weight, __ffs(mask) - 1);
      mask &= mask - 1;
    }
#pragma unroll
    for (int q = 0; q < batch.kRows; q++) {
      if (q < count) batch.rows[q].add_product_to(sum, weight[q]);
    }
    if (mask == 0) return;
    batch.load(role, terms, mask, lane_of_rows<kIn, kCount>(role, piece));
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
