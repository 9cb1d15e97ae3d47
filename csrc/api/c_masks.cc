// Masks of ranks in the C API.
#include "api/c_device.h"
#include "api/c_objects.h"
#include "api/c_tensor.h"

namespace ep::c {
namespace {

constexpr double kCleaningDeadlines = 4;  // the other ranks may be waiting for one in their last operation

// The group of a state that has masks.
Group& masking(const GroupState& state) {
  Group& group = state.get();
  EP_CHECK_USAGE(group.config().masks_late_ranks, "the group was made without enable_mask");
  return group;
}

void query(const GroupState& state, const ncclEpTensor_t* given, void* stream) {
  Group& group = masking(state);
  const Tensor masked = take_tensor(given, "masked");
  check_tensor(masked, "masked", NCCL_EP_INT32, {group.num_ranks()});
  group.query_masks(static_cast<int32_t*>(masked.data), stream);
}

void clean(GroupState& state) {
  Group& group = masking(state);
  EP_CHECK_USAGE(!state.has_missed_cleaning, "a rank did not come when masks were to be cleaned: make a new group");
  const ScopedDevice device(state.config.device);
  const auto bootstrap = state.rendezvous(kCleaningDeadlines * group.timeout_seconds());
  try {
    group.clean_masks(*bootstrap);
  } catch (const Error& error) {
    state.has_missed_cleaning = error.kind() != ErrorKind::kInvalidUsage;
    throw;
  }
}

}  // namespace
}  // namespace ep::c

using namespace ep::c;

extern "C" {

ncclEpResult_t ncclEpMaskQuery(ncclEpGroup_t group, const ncclEpTensor_t* masked, void* stream) {
  return guarded("ncclEpMaskQuery", [&] { query(*state_of(group), masked, stream); });
}

ncclEpResult_t ncclEpMaskUpdate(ncclEpGroup_t group, int rank, void* stream) {
  return guarded("ncclEpMaskUpdate", [&] { masking(*state_of(group)).mask(rank, stream); });
}

ncclEpResult_t ncclEpMaskClean(ncclEpGroup_t group) {
  return guarded("ncclEpMaskClean", [&] { clean(*state_of(group)); });
}

}  // extern "C"
