// Expert ids and weights on their way in and out, and the owners of experts, for both modes.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "cuda/protocol/device_state.h"

namespace ep {

__device__ __forceinline__ int64_t load_id(const void* ids, bool is_idx64, int64_t index) {
  return is_idx64 ? __ldg(static_cast<const long long*>(ids) + index) : __ldg(static_cast<const int*>(ids) + index);
}

__device__ __forceinline__ void store_id(void* ids, bool is_idx64, int64_t index, int id) {
  if (is_idx64) {
    static_cast<int64_t*>(ids)[index] = id;
  } else {
    static_cast<int32_t*>(ids)[index] = id;
  }
}

// Weights and ids of an output row that does not exist, in either mode.
template <class Params>
__device__ __forceinline__ void clear_entry(const Params& p, bool expert_rows, int64_t row) {
  if (expert_rows) {
    p.out_weights[row] = 0;
    if (p.row_expert != nullptr) p.row_expert[row] = -1;
    return;
  }
  for (int k = 0; k < p.shape.topk; k++) {
    const int64_t entry = row * p.shape.topk + k;
    p.out_weights[entry] = 0;
    store_id(p.out_topk_idx, p.is_idx64, entry, -1);
  }
}

// Choice k of an own token is `id`, which is no expert.
__device__ __forceinline__ void note_invalid_id(DeviceState* state, int64_t id, int token, int k) {
  if (id == -1) return;
  InvalidIds& invalid = state->diagnostics.invalid_ids;
  if (atomicAdd(reinterpret_cast<unsigned long long*>(&invalid.count), 1ull) == 0) {
    invalid.value = id;
    invalid.token = token;
    invalid.k = k;
    __threadfence_system();  // pairs with the acquire of CudaBackend::has_invalid_ids()
    *static_cast<volatile uint32_t*>(state->has_invalid_ids) = 1;
  }
}

// An id as it lies in memory, of either type: two loads without a wait. A choice between loads of two widths would be
// widened where it is loaded, which waits for it.
struct RawId {
  uint32_t low, high;

  __device__ __forceinline__ static RawId load(const void* ids, bool is_idx64, int64_t index) {
    const auto* p = static_cast<const char*>(ids) + (index << (is_idx64 ? 3 : 2));
    return {__ldg(reinterpret_cast<const uint32_t*>(p)),
            __ldg(reinterpret_cast<const uint32_t*>(p + (is_idx64 ? 4 : 0)))};
  }
  __device__ __forceinline__ int64_t value(bool is_idx64) const {
    return is_idx64 ? static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low) : static_cast<int32_t>(low);
  }
  // The id if it is below `limit`, else -1.
  __device__ __forceinline__ int64_t below(int limit, bool is_idx64) const {
    return low < static_cast<uint32_t>(limit) && (high == 0 || !is_idx64) ? static_cast<int64_t>(low) : -1;
  }
};

// A choice of a token: the rank of its expert and the expert's number there; rank -1 if there is none.
struct Choice {
  int rank = -1;
  int expert = 0;

  __device__ __forceinline__ static Choice of(int64_t id, int num_experts, const Divisor& by_local_experts) {
    Choice choice;
    if (id < 0 || id >= num_experts) return choice;
    choice.rank = by_local_experts.divide(static_cast<int>(id));
    choice.expert = by_local_experts.remainder(static_cast<int>(id), choice.rank);
    return choice;
  }
};

// The ranks that the lanes of a warp hold, one each or -1, in ascending order and each once: 32 numbers at a time, as
// bits of a word. A whole warp calls. In a world of 32 ranks at most there is one word.
class LaneRanks {
 public:
  uint32_t word = 0;  // bit i: rank first() + i is not taken yet

  __device__ __forceinline__ static LaneRanks of(int mine) {
    LaneRanks ranks;
    ranks.lane_ = static_cast<uint32_t>(mine) & 0xFFFF;
    ranks.word = __reduce_or_sync(~0u, static_cast<unsigned>(mine) < 32 ? 1u << mine : 0);
    return ranks;
  }
  __device__ __forceinline__ int first() const { return static_cast<int>(lane_ >> 16); }
  __device__ __forceinline__ bool has_more(int num_ranks) const {
    return word != 0 || (num_ranks > 32 && __any_sync(~0u, mine() >= first() + 32));
  }
  // If there are more, `word` has one of them afterwards.
  __device__ __forceinline__ void find() {
    if (word != 0) return;
    const auto lowest =
        static_cast<int>(__reduce_min_sync(~0u, mine() >= first() + 32 ? static_cast<unsigned>(mine()) : ~0u));
    const int next = lowest & ~31;
    word = __reduce_or_sync(~0u, mine() >= next && mine() < next + 32 ? 1u << (mine() - next) : 0);
    lane_ = static_cast<uint32_t>(next) << 16 | (lane_ & 0xFFFF);
  }
  __device__ __forceinline__ int take() {
    find();
    const int rank = first() + __ffs(static_cast<int>(word)) - 1;
    word &= word - 1;
    return rank;
  }

 private:
  __device__ __forceinline__ int mine() const { return static_cast<int16_t>(lane_); }
  static_assert(kMaxRanks < 1 << 15);
  uint32_t lane_ = 0;  // the lane's rank, and in the upper half first(): registers are few
};

}  // namespace ep
