// What stands behind ncclEpGroup_t and ncclEpHandle_t.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>

#include "api/c_error.h"
#include "api/c_request.h"
#include "base/overlap.h"
#include "runtime/common/layout_info.h"
#include "runtime/group.h"

namespace ep::c {

// Of so many ranks. Raises what a group cannot be made for.
GroupConfig to_group_config(const GroupRequest& config, int num_ranks);

// Shared by a group and its handles, so that a handle that outlives its group finds out.
struct GroupState {
  std::unique_ptr<Group> group;
  GroupRequest config;
  ncclComm* comm = nullptr;  // of NCCL, the caller's; null: there is none
  pid_t process;
  int ll_max_tokens = 0;  // room of low latency; 0: none
  uint64_t reported_drops = 0;
  std::map<void*, std::shared_ptr<void>> extents;  // of ncclEpxMemAlloc

  // How the ranks find one another once more, within so many seconds.
  using Rendezvous = std::function<std::unique_ptr<Bootstrap>(double seconds)>;
  Rendezvous rendezvous;

  // Masks of low latency, those that the caller asked for, those of which it knows as an error.
  RankMask asked_masks, known_masks;
  bool has_async_error = false;
  // Notes ranks that were masked because they were late.
  void note_masks();

  // The group, if this process may use it.
  Group& get() const;
  // Collective: makes the group anew, with room for so many choices of a token.
  void grow(int topk);
  // Unless the caller wants rows dropped: throws once for those that were, since the last time.
  void check_overflow();

  // Of a handle, on the group's device: by the caller's functions, if there are any.
  void* allocate_own(size_t bytes) const;
  void release_own(void* memory) const noexcept;
};

enum class Pending { kNothing, kDispatch, kCombine };

// Memory of a plain handle, of the library.
struct Scratch {
  char* memory = nullptr;
  int64_t rows = 0;  // of outputs that it has room for
  int32_t *info = nullptr, *row_expert = nullptr;
  float* weights = nullptr;
  void* ids = nullptr;
};

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
  // Made without options: as NCCL EP has handles. Outputs that its callers do not know go to `scratch`.
  bool is_plain = false;
  ep::c::Scratch scratch;

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
  ep::LayoutInfoParams layout_info;  // to be written when the dispatch is received

  ncclEpHandle() = default;
  ~ncclEpHandle();
  ncclEpHandle(const ncclEpHandle&) = delete;
  ncclEpHandle& operator=(const ncclEpHandle&) = delete;

  ep::HandlePtrs pointers(int num_tokens) const;
  ep::HtHandlePtrs ht_pointers(int num_tokens) const;
  bool is_eager() const { return is_plain && is_exact; }
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
