// Groups of the C API.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "api/c_device.h"
#include "api/c_live.h"
#include "api/c_objects.h"
#include "api/c_struct.h"
#include "api/factory.h"
#include "runtime/checks.h"
#include "runtime/policy.h"
#include "transport/same_size_bootstrap.h"

namespace ep::c {
namespace {

constexpr double kDefaultTimeoutSeconds = 100, kMinSetupSeconds = 60;
constexpr uint64_t kMaxTimeoutNs = 1'000'000'000'000'000'000;  // as the group's
double seconds_of(uint64_t timeout_ns) {
  EP_CHECK(timeout_ns <= kMaxTimeoutNs, "timeout_ns is ", timeout_ns, ", at most ", kMaxTimeoutNs);
  return timeout_ns == 0 ? kDefaultTimeoutSeconds : static_cast<double>(timeout_ns) / 1e9;
}

class CallbackBootstrap : public SameSizeBootstrap {
 public:
  CallbackBootstrap(int rank, int num_ranks, ncclEpAllgather_t allgather, void* context, uint64_t timeout_ns)
      : SameSizeBootstrap(rank, num_ranks), allgather_(allgather), context_(context), timeout_ns_(timeout_ns) {}

 private:
  void gather(const void* mine, void* all, size_t bytes) override {
    const ncclEpResult_t result = allgather_(context_, mine, all, bytes, timeout_ns_);
    if (result == NCCL_EP_SUCCESS) return;
    raise(result == NCCL_EP_TIMEOUT ? ErrorKind::kTimeout : ErrorKind::kSystem, "rank ", rank(), " could not gather ",
          bytes, " bytes from ", num_ranks(), " ranks: the callback returned ", result, ", ",
          ncclEpGetErrorString(result));
  }

  ncclEpAllgather_t allgather_;
  void* context_;
  uint64_t timeout_ns_;
};

void check_config(const ncclEpGroupConfig_t& config) {
  EP_CHECK(config.algorithm >= NCCL_EP_ALGORITHM_AUTO && config.algorithm <= NCCL_EP_ALGORITHM_HIGH_THROUGHPUT,
           "algorithm ", config.algorithm, " is unknown");
  EP_CHECK(config.device >= NCCL_EP_DEVICE_CPU, "device is ", config.device, ", must be NCCL_EP_DEVICE_CPU (",
           NCCL_EP_DEVICE_CPU, ") or the ordinal of a CUDA device");
  if (config.device >= 0 && !has_cuda_backend()) {
    throw ApiError(NCCL_EP_NOT_SUPPORTED,
                   concat("device is ", config.device, ", but this library was built without CUDA"));
  }
  EP_CHECK(config.domain_size >= 0, "domain_size is ", config.domain_size, ", must not be negative");
  const bool has_ll = config.algorithm != NCCL_EP_ALGORITHM_HIGH_THROUGHPUT;
  const size_t max_token_bytes = static_cast<size_t>(kMaxRowBytes) * (has_ll ? 1 : kHtMaxParts);
  EP_CHECK(config.max_token_bytes >= 1 && config.max_token_bytes <= max_token_bytes, "max_token_bytes is ",
           config.max_token_bytes, ", must be 1 to ", max_token_bytes);
  EP_CHECK(config.max_combine_row_bytes <= kMaxRowBytes, "max_combine_row_bytes is ", config.max_combine_row_bytes,
           ", at most ", kMaxRowBytes);
  EP_CHECK(config.overflow_policy == NCCL_EP_OVERFLOW_COUNT || config.overflow_policy == NCCL_EP_OVERFLOW_ERROR,
           "overflow_policy ", config.overflow_policy, " is unknown");
  EP_CHECK(config.max_num_sms >= 0, "max_num_sms is ", config.max_num_sms, ", must not be negative");
  EP_CHECK(config.arena_bytes == 0 || config.algorithm != NCCL_EP_ALGORITHM_LOW_LATENCY, "arena_bytes is ",
           config.arena_bytes, ", but low latency has no arena");
  EP_CHECK(config.enable_mask == 0 || has_ll, "enable_mask is ", config.enable_mask,
           ", but high throughput has no masks");
  check_flag(config.enable_mask, "enable_mask");
  EP_CHECK(config.ll_network >= NCCL_EP_LL_NETWORK_AUTO && config.ll_network <= NCCL_EP_LL_NETWORK_MESH, "ll_network ",
           config.ll_network, " is unknown");
}

// What low latency has room for, in tokens of a handle; 0: nothing.
int ll_max_tokens(const ncclEpGroupConfig_t& config, int num_ranks) {
  if (config.algorithm == NCCL_EP_ALGORITHM_HIGH_THROUGHPUT) return 0;
  if (config.algorithm == NCCL_EP_ALGORITHM_LOW_LATENCY) return config.max_tokens;
  const int64_t most = most_auto_ll_tokens(static_cast<int64_t>(config.max_token_bytes), config.topk, num_ranks);
  return static_cast<int>(std::clamp<int64_t>(most, 1, config.max_tokens));
}

GroupConfig to_group_config(const ncclEpGroupConfig_t& config, int num_ranks) {
  const Shape shape = Shape::make(num_ranks, config.num_experts, config.topk, config.max_tokens);
  const int dispatch_bytes = static_cast<int>(config.max_token_bytes);
  const int combine_bytes =
      config.max_combine_row_bytes == 0 ? dispatch_bytes : static_cast<int>(config.max_combine_row_bytes);
  GroupConfig result;
  result.domain_size = config.domain_size;
  if (const int ll_tokens = ll_max_tokens(config, num_ranks); ll_tokens > 0) {
    Shape ll_shape = shape;
    ll_shape.max_tokens = ll_tokens;
    result.sizes = sizes_for(ll_shape, dispatch_bytes, combine_bytes);
  }
  if (config.algorithm != NCCL_EP_ALGORITHM_LOW_LATENCY) {
    const Topology topology = Topology::make(num_ranks, config.domain_size == 0 ? num_ranks : config.domain_size);
    result.ht_sizes = ht_sizes_for(topology, shape, dispatch_bytes, combine_bytes, config.arena_bytes);
  }
  result.timeout_seconds = seconds_of(config.timeout_ns);
  result.masks_late_ranks = config.enable_mask != 0;
  result.ll_network = static_cast<LlNetwork>(config.ll_network);
  result.device_index = config.device;
  result.made_with =
      concat("max_tokens=", config.max_tokens, ", topk=", config.topk, ", num_experts=", config.num_experts,
             ", max_token_bytes=", config.max_token_bytes, ", max_combine_row_bytes=", config.max_combine_row_bytes,
             ", algorithm=", config.algorithm, ", arena_bytes=", config.arena_bytes);
  return result;
}

// For profilers.
std::string next_name(int rank) {
  static std::atomic<uint64_t> count = 0;
  return concat("group", count++, ".rank", rank);
}

// `comm`: the caller's, for windows; null: there is none. `rendezvous`: makes a bootstrap as this one.
ncclEpGroup_t make_group_object(Bootstrap& bootstrap, const ncclEpGroupConfig_t& given, ncclComm* comm,
                                GroupState::Rendezvous rendezvous) {
  auto state = std::make_shared<GroupState>();
  state->config = given;
  state->process = getpid();
  GroupConfig config = to_group_config(given, bootstrap.num_ranks());
  config.name = next_name(bootstrap.rank());
  config.nccl_comm = comm;
  state->rendezvous = std::move(rendezvous);
  state->ll_max_tokens = ll_max_tokens(given, bootstrap.num_ranks());
  auto object = std::make_unique<ncclEpGroup>();
  state->group = make_group(bootstrap, config);
  object->state = std::move(state);
  add_live(object.get(), ObjectKind::kGroup);
  return object.release();
}

}  // namespace

Group& GroupState::get() const {
  EP_CHECK_USAGE(getpid() == process, "the group belongs to process ", process, ", this is its fork ", getpid(),
                 ": make a group here");
  EP_CHECK_USAGE(!group->is_destroyed(), "the group was destroyed");
  return *group;
}

void GroupState::check_overflow() {
  if (config.overflow_policy != NCCL_EP_OVERFLOW_ERROR) return;
  const uint64_t all = group->report().dropped_rows;
  const uint64_t fresh = all - reported_drops;
  reported_drops = all;
  if (fresh == 0) return;
  throw ApiError(NCCL_EP_OVERFLOW, concat(fresh,
                                          " rows did not fit into the capacity of what received them and were "
                                          "dropped; the demand in info tells how many there were"));
}

std::shared_ptr<GroupState> state_of(ncclEpGroup_t group) {
  std::shared_ptr<GroupState> state;
  with_live(group, ObjectKind::kGroup, [&] { state = group->state; });
  return state;
}

}  // namespace ep::c

using namespace ep;
using namespace ep::c;

extern "C" {

ncclEpResult_t ncclEpCreateGroupFromCallback(ncclEpGroup_t* group, int rank, int num_ranks, ncclEpAllgather_t allgather,
                                             void* context, const ncclEpGroupConfig_t* given) {
  return guarded("ncclEpCreateGroupFromCallback", [&] {
    EP_CHECK(group != nullptr, "group is null");
    EP_CHECK(num_ranks >= 1 && rank >= 0 && rank < num_ranks, "rank ", rank, " of ", num_ranks, " ranks");
    EP_CHECK(allgather != nullptr || num_ranks == 1, "allgather is null in a world of ", num_ranks, " ranks");
    const ncclEpGroupConfig_t config = take(given, "config");
    check_config(config);
    const auto rendezvous = [=](double seconds) -> std::unique_ptr<Bootstrap> {
      const auto timeout_ns = static_cast<uint64_t>(seconds * 1e9);
      return std::make_unique<CallbackBootstrap>(rank, num_ranks, allgather, context, timeout_ns);
    };
    *group = make_group_object(*rendezvous(seconds_of(config.timeout_ns)), config, nullptr, rendezvous);
  });
}

ncclEpResult_t ncclEpCreateGroup(ncclEpGroup_t* group, struct ncclComm* comm, const ncclEpGroupConfig_t* given) {
  return guarded("ncclEpCreateGroup", [&] {
    EP_CHECK(group != nullptr, "group is null");
    EP_CHECK(comm != nullptr, "comm is null");
    const ncclEpGroupConfig_t config = take(given, "config");
    check_config(config);
    if (!has_cuda_backend()) {
      throw ApiError(NCCL_EP_NOT_SUPPORTED, "this library was built without CUDA: use ncclEpCreateGroupFromCallback");
    }
    EP_CHECK(config.device >= 0, "device is ", config.device, ", but the ranks of an NCCL communicator are on GPUs");
    // The first collective of a communicator sets it up, however short the deadline of operations.
    const double seconds = std::max(seconds_of(config.timeout_ns), kMinSetupSeconds);
    const ScopedDevice device(config.device);
    const auto rendezvous = [comm, ordinal = config.device](double deadline) {
      return bootstrap_of(comm, ordinal, deadline);
    };
    *group = make_group_object(*rendezvous(seconds), config, comm, rendezvous);
  });
}

ncclEpResult_t ncclEpGroupDestroy(ncclEpGroup_t group) {
  return guarded("ncclEpGroupDestroy", [&] {
    if (group == nullptr) return;
    if (getpid() != state_of(group)->process) return;  // its threads are not here, and its memory is the parent's
    remove_live(group, ObjectKind::kGroup);
    const std::unique_ptr<ncclEpGroup> object(group);
    object->state->group->destroy();
    object->state->extents.clear();
  });
}

ncclEpResult_t ncclEpGroupSetTimeout(ncclEpGroup_t group, uint64_t timeout_ns) {
  return guarded("ncclEpGroupSetTimeout", [&] { state_of(group)->get().set_timeout(seconds_of(timeout_ns)); });
}

ncclEpResult_t ncclEpCheck(ncclEpGroup_t group) {
  return guarded("ncclEpCheck", [&] {
    const std::shared_ptr<GroupState> state = state_of(group);
    state->get().check();
    state->check_overflow();
  });
}

ncclEpResult_t ncclEpGroupGetInfo(ncclEpGroup_t group, ncclEpGroupInfo_t* info) {
  return guarded("ncclEpGroupGetInfo", [&] {
    const std::shared_ptr<GroupState> state = state_of(group);
    Group& inner = state->get();
    ncclEpGroupInfo_t full = take(info, "info");
    const Report report = inner.report();
    full.rank = inner.rank();
    full.num_ranks = inner.num_ranks();
    full.domain_size = inner.topology().domain_size;
    full.algorithm = state->config.algorithm;
    full.window_bytes = inner.window().bytes;
    full.num_dispatches = report.epochs[static_cast<int>(Kind::kDispatch)];
    full.num_combines = report.epochs[static_cast<int>(Kind::kCombine)];
    full.dropped_rows = report.dropped_rows;
    full.num_ht_dispatches = report.ht_epochs[static_cast<int>(Kind::kDispatch)];
    full.num_ht_combines = report.ht_epochs[static_cast<int>(Kind::kCombine)];
    full.num_staged_dispatches = report.ht_staged[static_cast<int>(Kind::kDispatch)];
    full.num_staged_combines = report.ht_staged[static_cast<int>(Kind::kCombine)];
    const auto arena = inner.arena();
    full.arena_bytes = arena ? arena->bytes() : 0;
    full.arena_free_bytes = arena ? arena->free_bytes() : 0;
    full.ll_max_tokens = state->ll_max_tokens;
    give(info, full);
  });
}

ncclEpResult_t ncclEpMemAlloc(ncclEpGroup_t group, void** memory, size_t bytes) {
  return guarded("ncclEpMemAlloc", [&] {
    const std::shared_ptr<GroupState> state = state_of(group);
    EP_CHECK(memory != nullptr, "memory is null");
    std::shared_ptr<void> extent = Arena::take(state->get().arena(), bytes);
    if (extent == nullptr) {
      const int device = state->config.device;
      extent = {allocate(device, std::max<size_t>(bytes, 1)), [device](void* own) { release(device, own); }};
    }
    *memory = extent.get();
    state->extents[*memory] = std::move(extent);
  });
}

ncclEpResult_t ncclEpMemFree(ncclEpGroup_t group, void* memory) {
  return guarded("ncclEpMemFree", [&] {
    const std::shared_ptr<GroupState> state = state_of(group);
    if (memory == nullptr) return;
    state->get();
    EP_CHECK(state->extents.erase(memory) == 1, "memory at ", memory, " is not of ncclEpMemAlloc with this group");
  });
}

}  // extern "C"
