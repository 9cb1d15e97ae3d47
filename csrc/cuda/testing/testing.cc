#include "cuda/testing/testing.h"

#if defined(EP_LAB)

#include "base/check.h"
#include "base/testing.h"
#include "transport/device/device_guard.h"

namespace ep {
namespace {

// Made when it is first asked for: files of kernels add themselves before main() begins, in any order.
std::vector<GpuTestingSetter>& setters() {
  static std::vector<GpuTestingSetter> all;
  return all;
}

struct NamedBug {
  const char* name;
  testing::Bug bug;
};
constexpr NamedBug kNamedBugs[] = {
    {"one_bank", testing::Bug::kOneBank},
    {"skipped_reset", testing::Bug::kSkippedReset},
    {"reused_epoch", testing::Bug::kReusedEpoch},
    {"early_done", testing::Bug::kEarlyDone},
    {"early_rows", testing::Bug::kEarlyRows},
    {"ignored_credits", testing::Bug::kIgnoredCredits},
    {"unchecked_headers", testing::Bug::kUncheckedHeaders},
    {"early_epoch", testing::Bug::kEarlyEpoch},
    {"torn_rows", testing::Bug::kTornRows},
    {"unannounced_rows", testing::Bug::kUnannouncedRows},
    {"signal_before_data", testing::Bug::kSignalBeforeData},
    {"one_parity", testing::Bug::kOneParity},
    {"one_staging_bank", testing::Bug::kOneStagingBank},
    {"skipped_wait", testing::Bug::kSkippedWait},
    {"early_source", testing::Bug::kEarlySource},
    {"skipped_chunk", testing::Bug::kSkippedChunk},
    {"early_slice", testing::Bug::kEarlySlice},
    {"late_chunks", testing::Bug::kLateChunks},
    {"uncounted_posts", testing::Bug::kUncountedPosts},
};
static_assert(static_cast<int>(testing::Bug::kNumBugs) <= 32, "a bit for each");

uint32_t bug_named(const std::string& name) {
  std::string known;
  for (const NamedBug& each : kNamedBugs) {
    if (name == each.name) return 1u << static_cast<int>(each.bug);
    known += known.empty() ? each.name : concat(", ", each.name);
  }
  raise(ErrorKind::kInvalidArgument, "no kernel can have the bug \"", name, "\": there are ", known);
}

}  // namespace

uint32_t bugs_named(const std::vector<std::string>& names) {
  uint32_t bugs = 0;
  for (const std::string& name : names) bugs |= bug_named(name);
  return bugs;
}

void set_gpu_testing(int device, const GpuTesting& testing) {
  DeviceGuard guard(device);
  set_on_current_gpu(testing);
}

void set_on_current_gpu(const GpuTesting& testing) {
  for (GpuTestingSetter set : setters()) set(testing);
}

bool add_gpu_testing_setter(GpuTestingSetter setter) {
  setters().push_back(setter);
  return true;
}

}  // namespace ep

#endif
