// Groups of the C API.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "api/c_comm.h"
#include "api/c_device.h"
#include "api/c_live.h"
#include "api/c_objects.h"
#include "api/c_struct.h"
#include "api/factory.h"
#include "runtime/checks.h"
#include "runtime/room.h"

namespace ep::c {
namespace {

constexpr double kDefaultTimeoutSeconds = 100, kMinSetupSeconds = 60;
constexpr uint64_t kMaxTimeoutNs = 1'000'000'000'000'000'000;  // as the group's
double seconds_of(uint64_t timeout_ns) {
  EP_CHECK(timeout_ns <= kMaxTimeoutNs, "timeout_ns is ", timeout_ns, ", at most ", kMaxTimeoutNs);
  return timeout_ns == 0 ? kDefaultTimeoutSeconds : static_cast<double>(timeout_ns) / 1e9;
}

// NCCL_EP_TIMEOUT_MS goes before the config.
uint64_t timeout_of(const ncclEpGroupConfig_t& config) {
  const char* text = std::getenv("NCCL_EP_TIMEOUT_MS");
  if (text == nullptr || *text == '\0') return config.timeout_ns;
  char* end = nullptr;
  const unsigned long long milliseconds = std::strtoull(text, &end, 10);
  EP_CHECK(*end == '\0' && *text >= '0' && *text <= '9' && milliseconds <= kMaxTimeoutNs / 1'000'000,
           "NCCL_EP_TIMEOUT_MS is ", text, ", must be a number up to ", kMaxTimeoutNs / 1'000'000);
  return milliseconds * 1'000'000;
}

constexpr int kUsualTopk = 8;  // of a group whose caller says nothing

void check_rows(const GroupRequest& request) {
  const bool has_ll = request.algorithm != NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT;
  const size_t most = static_cast<size_t>(kMaxRowBytes) * (has_ll ? 1 : kHtMaxParts);
  EP_CHECK(request.max_token_bytes >= 1 && request.max_token_bytes <= most, "max_token_bytes is ",
           request.max_token_bytes, ", must be 1 to ", most);
  EP_CHECK(has_ll || request.max_token_bytes % 16 == 0, "max_token_bytes is ", request.max_token_bytes,
           ", must be a multiple of 16 in high throughput");
  EP_CHECK(request.max_combine_row_bytes <= kMaxRowBytes, "max_combine_row_bytes is ", request.max_combine_row_bytes,
           ", at most ", kMaxRowBytes);
  EP_CHECK(request.arena_bytes == 0 || request.algorithm != NCCL_EPX_ALGORITHM_LOW_LATENCY, "arena_bytes is ",
           request.arena_bytes, ", but low latency has no arena");
  EP_CHECK(!request.enable_mask || has_ll, "enable_mask is set, but high throughput has no masks");
}

void check_received(const GroupRequest& request) {
  if (!request.is_ht) return;
  EP_CHECK(request.max_recv == 0 || request.max_recv >= request.max_tokens, "max_recv_tokens_per_rank is ",
           request.max_recv, ", must be NCCL_EP_AUTO or at least max_dispatch_tokens_per_rank, ", request.max_tokens);
  EP_CHECK(request.max_recv != 0 || !request.drops,
           "overflow_policy is DROP, but max_recv_tokens_per_rank is AUTO: whatever comes fits");
}

// What low latency has room for, in tokens of a handle; 0: nothing.
int ll_max_tokens(const GroupRequest& config, int num_ranks) {
  if (config.algorithm == NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT) return 0;
  if (config.algorithm == NCCL_EPX_ALGORITHM_LOW_LATENCY) return config.max_tokens;
  const Shape shape = Shape::make(num_ranks, config.num_experts, config.topk, config.max_tokens);
  return auto_ll_tokens(shape, static_cast<int64_t>(config.max_token_bytes), config.device >= 0);
}

// For profilers.
std::string next_name(int rank) {
  static std::atomic<uint64_t> count = 0;
  return concat("group", count++, ".rank", rank);
}

std::unique_ptr<Group> make(const GroupState& state, Bootstrap& bootstrap) {
  GroupConfig config = to_group_config(state.config, bootstrap.num_ranks());
  config.name = next_name(bootstrap.rank());
  config.nccl_comm = state.comm;
  return make_group(bootstrap, config);
}

// `comm`: of NCCL, for windows; null: there is none. `rendezvous`: makes a bootstrap as this one.
ncclEpGroup_t make_group_object(Bootstrap& bootstrap, const GroupRequest& request, ncclComm* comm,
                                GroupState::Rendezvous rendezvous) {
  auto state = std::make_shared<GroupState>();
  state->config = request;
  state->comm = comm;
  state->process = getpid();
  state->rendezvous = std::move(rendezvous);
  state->ll_max_tokens = ll_max_tokens(request, bootstrap.num_ranks());
  auto object = std::make_unique<ncclEpGroup>();
  state->group = make(*state, bootstrap);
  object->state = std::move(state);
  add_live(object.get(), ObjectKind::kGroup);
  return object.release();
}

// The first collective of a communicator sets it up, however short the deadline of operations.
double setup_seconds(double seconds, const ncclComm* comm) {
  return comm == nullptr ? seconds : std::max(seconds, kMinSetupSeconds);
}

void create_group(ncclEpGroup_t* group, ncclComm* comm, const ncclEpGroupConfig_t* config,
                  const ncclEpxGroupOptions_t* options) {
  EP_CHECK(group != nullptr, "group is null");
  EP_CHECK(comm != nullptr, "comm is null");
  const std::optional<CallbackComm> ours = callback_comm(comm);
  if (!ours && !has_cuda_backend()) {
    throw ApiError(NCCL_EPX_NOT_SUPPORTED,
                   "comm is of NCCL, but this library was built without CUDA: ncclEpxCommFromCallback makes one");
  }
  const int device = ours ? ours->device : device_of(comm);
  const GroupRequest request = take_group(config, options, device);
  const ScopedDevice scope(device);
  GroupState::Rendezvous rendezvous;
  if (ours) {
    rendezvous = [ours = *ours](double seconds) { return c::bootstrap_of(ours, seconds); };
  } else {
    rendezvous = [comm, device](double seconds) { return ep::bootstrap_of(comm, device, seconds); };
  }
  ncclComm* const of_nccl = ours ? nullptr : comm;
  const auto bootstrap = rendezvous(setup_seconds(seconds_of(request.timeout_ns), of_nccl));
  *group = make_group_object(*bootstrap, request, of_nccl, rendezvous);
}

}  // namespace

GroupConfig to_group_config(const GroupRequest& config, int num_ranks) {
  const Shape shape = Shape::make(num_ranks, config.num_experts, config.topk, config.max_tokens);
  const int dispatch_bytes = static_cast<int>(config.max_token_bytes);
  const int combine_bytes =
      config.max_combine_row_bytes == 0 ? dispatch_bytes : static_cast<int>(config.max_combine_row_bytes);
  GroupConfig result;
  result.domain_size = config.domain_size;
  if (const int ll_tokens = ll_max_tokens(config, num_ranks); ll_tokens > 0) {
    Shape ll_shape = shape;
    ll_shape.max_tokens = ll_tokens;
    result.sizes = ll_sizes_for(ll_shape, dispatch_bytes, combine_bytes, config.device >= 0);
  }
  if (config.algorithm != NCCL_EPX_ALGORITHM_LOW_LATENCY) {
    const Topology topology = Topology::make(num_ranks, config.domain_size == 0 ? num_ranks : config.domain_size);
    result.ht_sizes = ht_sizes_for(topology, shape, dispatch_bytes, combine_bytes, config.arena_bytes);
  }
  result.timeout_seconds = seconds_of(config.timeout_ns);
  result.masks_late_ranks = config.enable_mask;
  result.ll_network = static_cast<LlNetwork>(config.ll_network);
  result.uses_cumem = config.window == NCCL_EPX_WINDOW_CUMEM;
  result.device_index = config.device;
  result.made_with =
      concat("max_tokens=", config.max_tokens, ", topk=", config.topk, ", num_experts=", config.num_experts,
             ", max_token_bytes=", config.max_token_bytes, ", max_combine_row_bytes=", config.max_combine_row_bytes,
             ", algorithm=", config.algorithm, ", arena_bytes=", config.arena_bytes);
  return result;
}

GroupRequest take_group(const ncclEpGroupConfig_t* given, const ncclEpxGroupOptions_t* given_options, int device) {
  const auto config = take(given, "config");
  const auto options = take_or_default(given_options, "options");
  check_flag(options.both_algorithms, "both_algorithms");
  const uint32_t algorithm = choice_of(config.algorithm, NCCL_EP_ALGO_HIGH_THROUGHPUT, "algorithm");
  const uint32_t zero_copy = choice_of(config.zero_copy, NCCL_EP_ZERO_COPY_ON, "zero_copy");
  const uint32_t policy = choice_of(config.overflow_policy, NCCL_EP_OVERFLOW_DROP, "overflow_policy");
  EP_CHECK(options.domain_size >= 0, "domain_size is ", options.domain_size, ", must not be negative");
  EP_CHECK(options.ll_network >= NCCL_EPX_LL_NETWORK_AUTO && options.ll_network <= NCCL_EPX_LL_NETWORK_MESH,
           "ll_network ", options.ll_network, " is unknown");
  EP_CHECK(options.window == NCCL_EPX_WINDOW_NCCL || options.window == NCCL_EPX_WINDOW_CUMEM, "window ", options.window,
           " is unknown");
  EP_CHECK_USAGE((config.alloc.alloc_fn == nullptr) == (config.alloc.free_fn == nullptr),
                 "alloc has one function, must have both or none");
  GroupRequest request;
  request.algorithm = options.both_algorithms ? NCCL_EPX_ALGORITHM_AUTO : static_cast<int32_t>(algorithm) + 1;
  request.is_ht = algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
  request.device = device;
  request.num_experts = to_int(config.num_experts, "num_experts");
  request.max_tokens = to_int(config.max_dispatch_tokens_per_rank, "max_dispatch_tokens_per_rank");
  EP_CHECK(request.max_tokens >= 1, "max_dispatch_tokens_per_rank is 0, must be at least 1");
  request.topk = to_int(config.num_topk, "num_topk");
  request.may_grow = request.topk == 0;
  if (request.may_grow) request.topk = std::clamp(request.num_experts, 1, kUsualTopk);
  request.domain_size = options.domain_size;
  request.max_recv = to_int(config.max_recv_tokens_per_rank, "max_recv_tokens_per_rank");
  request.max_token_bytes = config.max_token_bytes;
  request.max_combine_row_bytes = options.max_combine_row_bytes;
  request.timeout_ns = timeout_of(config);
  request.needs_windows = zero_copy == NCCL_EP_ZERO_COPY_ON;
  request.drops = policy == NCCL_EP_OVERFLOW_DROP;
  request.max_num_sms = to_int(config.max_num_sms, "max_num_sms");
  request.arena_bytes = options.arena_bytes;
  request.enable_mask = config.enable_mask != 0;
  request.ll_network = options.ll_network;
  request.window = options.window;
  request.alloc = config.alloc;
  check_rows(request);
  check_received(request);
  seconds_of(request.timeout_ns);
  return request;
}

Group& GroupState::get() const {
  EP_CHECK_USAGE(getpid() == process, "the group belongs to process ", process, ", this is its fork ", getpid(),
                 ": make a group here");
  EP_CHECK_USAGE(!group->is_destroyed(), "the group was destroyed");
  return *group;
}

void GroupState::grow(int topk) {
  EP_CHECK_USAGE(extents.empty(), "a handle of top-k ", topk, " needs a larger window than the group has for top-k ",
                 config.topk, ", but memory of ncclEpxMemAlloc lies in it: say num_topk in the group's config");
  get();
  const ScopedDevice scope(config.device);
  const auto bootstrap = rendezvous(setup_seconds(group->timeout_seconds(), comm));
  const double seconds = group->timeout_seconds();
  const int before = std::exchange(config.topk, topk);
  std::unique_ptr<Group> wider;
  try {
    wider = make(*this, *bootstrap);
  } catch (...) {
    config.topk = before;
    throw;
  }
  group->destroy();
  group = std::move(wider);
  group->set_timeout(seconds);
  ll_max_tokens = c::ll_max_tokens(config, group->num_ranks());
  reported_drops = 0;
  asked_masks = known_masks = {};
}

void* GroupState::allocate_own(size_t bytes) const {
  if (config.alloc.alloc_fn == nullptr) return allocate(config.device, bytes);
  void* memory = nullptr;
  const cudaError_t error = config.alloc.alloc_fn(&memory, bytes, config.alloc.context);
  if (number_of(error) != 0 || memory == nullptr) {
    raise(ErrorKind::kSystem, "alloc_fn returned ", number_of(error), " and no memory: ", bytes,
          " bytes were asked for");
  }
  return memory;
}

void GroupState::release_own(void* memory) const noexcept {
  if (memory == nullptr) return;
  if (config.alloc.free_fn == nullptr) return release(config.device, memory);
  config.alloc.free_fn(memory, config.alloc.context);
}

void GroupState::check_overflow() {
  if (config.drops) return;
  const uint64_t all = group->report().dropped_rows;
  const uint64_t fresh = all - reported_drops;
  reported_drops = all;
  if (fresh == 0) return;
  throw ApiError(NCCL_EPX_OVERFLOW, concat(fresh,
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

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t* group, ncclComm_t comm, const ncclEpGroupConfig_t* config) {
  return guarded("ncclEpCreateGroup", [&] { create_group(group, comm, config, nullptr); });
}

ncclResult_t ncclEpxCreateGroup(ncclEpGroup_t* group, ncclComm_t comm, const ncclEpGroupConfig_t* config,
                                const ncclEpxGroupOptions_t* options) {
  return guarded("ncclEpxCreateGroup", [&] { create_group(group, comm, config, options); });
}

ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t group) {
  return guarded("ncclEpGroupDestroy", [&] {
    if (group == nullptr) return;
    if (getpid() != state_of(group)->process) return;  // its threads are not here, and its memory is the parent's
    remove_live(group, ObjectKind::kGroup);
    const std::unique_ptr<ncclEpGroup> object(group);
    object->state->group->destroy();
    object->state->extents.clear();
  });
}

ncclResult_t ncclEpxGroupSetTimeout(ncclEpGroup_t group, uint64_t timeout_ns) {
  return guarded("ncclEpxGroupSetTimeout", [&] { state_of(group)->get().set_timeout(seconds_of(timeout_ns)); });
}

ncclResult_t ncclEpxCheck(ncclEpGroup_t group) {
  return guarded("ncclEpxCheck", [&] {
    const std::shared_ptr<GroupState> state = state_of(group);
    state->get().check();
    state->check_overflow();
  });
}

ncclResult_t ncclEpxGroupGetInfo(ncclEpGroup_t group, ncclEpxGroupInfo_t* info) {
  return guarded("ncclEpxGroupGetInfo", [&] {
    const std::shared_ptr<GroupState> state = state_of(group);
    Group& inner = state->get();
    auto full = take(info, "info");
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
    full.topk = state->config.topk;
    give(info, full);
  });
}

ncclResult_t ncclEpxMemAlloc(ncclEpGroup_t group, void** memory, size_t bytes) {
  return guarded("ncclEpxMemAlloc", [&] {
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

ncclResult_t ncclEpxMemFree(ncclEpGroup_t group, void* memory) {
  return guarded("ncclEpxMemFree", [&] {
    const std::shared_ptr<GroupState> state = state_of(group);
    if (memory == nullptr) return;
    state->get();
    EP_CHECK(state->extents.erase(memory) == 1, "memory at ", memory, " is not of ncclEpxMemAlloc with this group");
  });
}

}  // extern "C"
