// What stands behind ncclEpGroup_t and ncclEpHandle_t.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>

#include "api/c_error.h"
#include "base/overlap.h"
#include "nccl_ep.h"
#include "runtime/group.h"

namespace ep::c {

// Shared by a group and its handles, so that a handle that outlives its group finds out.
struct GroupState {
  std::unique_ptr<Group> group;
  ncclEpGroupConfig_t config;
  pid_t process;
  int ll_max_tokens = 0;  // room of low latency; 0: none
  uint64_t reported_drops = 0;
  std::map<void*, std::shared_ptr<void>> extents;  // of ncclEpMemAlloc

  // How the ranks find one another once more, within so many seconds.
  using Rendezvous = std::function<std::unique_ptr<Bootstrap>(double seconds)>;
  Rendezvous rendezvous;
  bool has_missed_cleaning = false;  // of masks: the ranks are not at the same step of the rendezvous any more

  // The group, if this process may use it.
  Group& get() const;
  // NCCL_EP_OVERFLOW_ERROR: throws once for rows that were dropped since the last time.
  void check_overflow();
};

enum class Pending { kNothing, kDispatch, kCombine };

}  // namespace ep::c

struct ncclEpGroup {
  std::shared_ptr<ep::c::GroupState> state;
};

struct ncclEpHandle {
  std::shared_ptr<ep::c::GroupState> state;
  ep::Shape shape;
  ep::OutputShape output;
  int32_t* memory = nullptr;
  uint64_t memory_bytes = 0;
  bool owns_memory = false;
  bool is_ht = false;
  bool is_exact = false;  // high throughput: `output` has its rows once they are known

  // For the next dispatch.
  const void* topk_idx = nullptr;
  bool is_idx64 = true;
  int given_tokens = -1;   // before the first ncclEpUpdateHandle
  bool is_routed = false;  // high throughput: ncclEpRouteHandle has sent these ids

  // Of the last dispatch, which combine answers.
  int dispatched_tokens = -1;  // before the first

  // Parameters of the split call that is open.
  ep::c::Pending pending = ep::c::Pending::kNothing;
  ep::LlDispatchParams dispatch;
  ep::LlCombineParams combine;

  ncclEpHandle() = default;
  ~ncclEpHandle();
  ncclEpHandle(const ncclEpHandle&) = delete;
  ncclEpHandle& operator=(const ncclEpHandle&) = delete;

  ep::HandlePtrs pointers(int num_tokens) const;
  ep::HtHandlePtrs ht_pointers(int num_tokens) const;
  int device() const { return state->config.device; }
  int num_sms(int asked) const;
  void require_nothing_pending() const;
  void require_dispatched() const;
  void require_given() const;  // the ids
  ep::Extent memory_extent() const { return {memory, memory_bytes, nullptr, 0}; }
  ep::Extent ids_extent() const;
  bool rows_are_known() const { return !is_exact || is_routed; }
  void require_rows(bool is_cached) const;  // that a dispatch, or a cached one, knows its outputs
};

namespace ep::c {

// Refuse what is no live object of the kind. Whoever holds the state of a group may be in a call while another thread
// destroys the group.
ncclEpHandle& object_of(ncclEpHandle_t handle);
std::shared_ptr<GroupState> state_of(ncclEpGroup_t group);

}  // namespace ep::c
