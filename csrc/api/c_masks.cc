// Masks of ranks in the C API.
#include "api/c_device.h"
#include "api/c_objects.h"
#include "api/factory.h"

namespace ep::c {
namespace {

constexpr double kCleaningDeadlines = 4;  // the other ranks may be waiting for one in their last operation

// The group of a state that has masks.
Group& masking(const GroupState& state) {
  Group& group = state.get();
  EP_CHECK_USAGE(group.config().masks_late_ranks, "the group was made without enable_mask");
  return group;
}

void query(const GroupState& state, int* status, void* stream) {
  Group& group = masking(state);
  EP_CHECK(status != nullptr, "mask_status is null");
  EP_CHECK(reinterpret_cast<uintptr_t>(status) % alignof(int) == 0, "mask_status at address ", status,
           " is not aligned to its elements of ", sizeof(int), " bytes");
  const ScopedDevice device(state.config.device);
  group.query_masks(status, stream);
  // The library has 1 for a masked rank: its complement.
  LayoutInfoParams flip;
  flip.ids = flip.out_ids = {status, false};
  flip.num_ids = group.num_ranks();
  flip.is_mask = true;
  write_layout_info(flip, state.config.device >= 0, stream);
}

void update(GroupState& state, const int* mask, void* stream) {
  Group& group = masking(state);
  EP_CHECK(mask != nullptr, "mask is null");
  RankMask masked;
  for (int r = 0; r < group.num_ranks(); r++) {
    EP_CHECK(mask[r] == 0 || mask[r] == 1, "mask of rank ", r, " is ", mask[r], ", must be 0 or 1");
    EP_CHECK(mask[r] == 1 || r != group.rank(), "mask of rank ", r, " is 0, but that is this rank itself");
    if (mask[r] == 0) masked.add(r);
  }
  const ScopedDevice device(state.config.device);
  const bool runs_now = !is_capturing(state.config.device, stream);
  if (runs_now) state.note_masks();
  group.update_masks(masked, stream);
  const RankMask known = state.asked_masks | state.known_masks;
  state.asked_masks = masked;
  state.known_masks = state.known_masks & masked;
  // If one that counts as active is masked again, it is news, which what is masked still must not be taken for.
  if (runs_now && !masked.has_all(known)) synchronize(state.config.device, stream);
}

void clean(GroupState& state) {
  Group& group = masking(state);
  state.note_masks();
  const ScopedDevice device(state.config.device);
  group.clean_masks(*state.rendezvous(kCleaningDeadlines * group.timeout_seconds()));
  state.asked_masks = state.known_masks = {};
}

}  // namespace

void GroupState::note_masks() {
  const RankMask masked = group->report().masked;
  has_async_error = has_async_error || !(asked_masks | known_masks).has_all(masked);
  known_masks = known_masks | masked;
}

}  // namespace ep::c

using namespace ep::c;

extern "C" {

ncclResult_t ncclEpMaskQuery(ncclEpGroup_t group, int* mask_status, cudaStream_t stream) {
  return guarded("ncclEpMaskQuery", [&] { query(*state_of(group), mask_status, stream); });
}

ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t group, const int* mask, cudaStream_t stream) {
  return guarded("ncclEpMaskUpdate", [&] { update(*state_of(group), mask, stream); });
}

ncclResult_t ncclEpMaskClean(ncclEpGroup_t group, cudaStream_t) {
  return guarded("ncclEpMaskClean", [&] { clean(*state_of(group)); });
}

ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t group, int* error_out) {
  return guarded("ncclEpGetAsyncError", [&] {
    const auto state = state_of(group);
    masking(*state);
    EP_CHECK(error_out != nullptr, "error_out is null");
    state->note_masks();
    *error_out = state->has_async_error ? 1 : 0;
  });
}

ncclResult_t ncclEpErrorClear(ncclEpGroup_t group) {
  return guarded("ncclEpErrorClear", [&] {
    const auto state = state_of(group);
    masking(*state);
    state->note_masks();
    state->has_async_error = false;
  });
}

}  // extern "C"
