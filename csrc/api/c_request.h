// What callers ask for, of NCCL EP's structs and of ours together.
#pragma once

#include <cstdint>
#include <optional>

#include "api/c_struct.h"
#include "nccl_epx.h"

namespace ep::c {

struct GroupRequest {
  ncclEpxAlgorithm_t algorithm = NCCL_EPX_ALGORITHM_AUTO;  // AUTO: room for both
  bool is_ht = false;                                      // handles without options are of high throughput
  int device = NCCL_EPX_DEVICE_CPU;
  int num_experts = 0, max_tokens = 0, topk = 0, domain_size = 0;
  bool may_grow = false;  // the caller has not said what topk is
  int64_t max_recv = 0;   // rows of outputs of high throughput; 0: as many as come
  size_t max_token_bytes = 0, max_combine_row_bytes = 0;
  uint64_t timeout_ns = 0;
  bool needs_windows = false;  // zero_copy is ON
  bool drops = false;          // rows that do not fit, without an error
  int max_num_sms = 0;
  uint64_t arena_bytes = 0;
  bool enable_mask = false;
  ncclEpxLlNetwork_t ll_network = NCCL_EPX_LL_NETWORK_AUTO;
  ncclEpxWindow_t window = NCCL_EPX_WINDOW_NCCL;
  ncclEpAllocConfig_t alloc{};
};
// Checked as far as it needs no other rank.
GroupRequest take_group(const ncclEpGroupConfig_t* config, const ncclEpxGroupOptions_t* options, int device);

struct HandleRequest {
  ncclEpLayout_t layout = NCCL_EP_LAYOUT_UNSET;
  size_t alignment = 0;
  int num_topk = 0;
  std::optional<ncclEpxHandleOptions_t> options;
};

// An unsigned number of a caller's.
inline int to_int(unsigned value, const char* name) {
  EP_CHECK(value <= INT32_MAX, name, " is ", value, ", at most ", INT32_MAX);
  return static_cast<int>(value);
}

}  // namespace ep::c
