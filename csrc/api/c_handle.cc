// Handles of the C API: memory, sizes, and what was routed with them.
#include <algorithm>

#include "api/c_device.h"
#include "api/c_live.h"
#include "api/c_objects.h"
#include "api/c_struct.h"
#include "api/c_tensor.h"
#include "runtime/call.h"

namespace ep::c {
namespace {

OutputLayout to_layout(ncclEpLayout_t layout) {
  switch (layout) {
    case NCCL_EP_LAYOUT_EXPERT_MAJOR:
      return OutputLayout::kExpertMajor;
    case NCCL_EP_LAYOUT_PACKED:
      return OutputLayout::kPacked;
    case NCCL_EP_LAYOUT_RANK_MAJOR:
      return OutputLayout::kRankMajor;
    case NCCL_EP_LAYOUT_FLAT:
      return OutputLayout::kFlat;
    case NCCL_EP_LAYOUT_UNSET:
      raise(ErrorKind::kInvalidArgument, "layout is not set");
    default:
      raise(ErrorKind::kInvalidArgument, "layout ", layout, " is unknown");
  }
}

struct HandleSizes {
  Shape shape;
  OutputShape output;
  bool is_ht, is_exact;
  int64_t bytes;  // whatever the number of tokens
};

// Of a handle whose sizes are `shape`.
bool takes_ht(const GroupState& state, const Shape& shape, const ncclEpHandleConfig_t& config) {
  const ncclEpAlgorithm_t of_group = state.config.algorithm;
  EP_CHECK(config.algorithm >= NCCL_EP_ALGORITHM_AUTO && config.algorithm <= NCCL_EP_ALGORITHM_HIGH_THROUGHPUT,
           "algorithm ", config.algorithm, " is unknown");
  EP_CHECK(
      config.algorithm == NCCL_EP_ALGORITHM_AUTO || of_group == NCCL_EP_ALGORITHM_AUTO || config.algorithm == of_group,
      "algorithm is ", config.algorithm, ", but the group was made with ", of_group, ": make it with ",
      NCCL_EP_ALGORITHM_AUTO, " to have room for both");
  const bool is_exact = config.capacity == NCCL_EP_CAPACITY_EXACT;
  bool is_ht =
      (config.algorithm == NCCL_EP_ALGORITHM_AUTO ? of_group : config.algorithm) == NCCL_EP_ALGORITHM_HIGH_THROUGHPUT;
  if (config.algorithm == NCCL_EP_ALGORITHM_AUTO && of_group == NCCL_EP_ALGORITHM_AUTO) {
    is_ht = is_exact || shape.max_tokens > state.ll_max_tokens;
  }
  EP_CHECK(is_ht || shape.max_tokens <= state.ll_max_tokens, "max_tokens is ", shape.max_tokens,
           ", but the group has room for low latency up to ", state.ll_max_tokens);
  return is_ht;
}

// Rows of the outputs; INT32_MAX until they are known: nothing is dropped.
int64_t capacity_of(const ncclEpHandleConfig_t& config, const Shape& shape, OutputLayout layout, bool is_ht,
                    int alignment) {
  EP_CHECK(config.capacity == 0 || layout != OutputLayout::kRankMajor, "capacity is ", config.capacity,
           ", but layout rank_major always holds max_tokens rows of a rank");
  DispatchCall call;
  call.mode = is_ht ? Mode::kHt : Mode::kLl;
  call.config.num_experts = shape.num_experts;
  call.config.topk = shape.topk;
  call.config.layout = layout;
  call.config.alignment = alignment;
  call.max_tokens = shape.max_tokens;
  call.is_exact = config.capacity == NCCL_EP_CAPACITY_EXACT;
  if (config.capacity != 0) call.capacity = config.capacity;
  const int64_t rows = call.check(shape.num_ranks).capacity;
  return rows == kExactCapacity ? INT32_MAX : rows;
}

// The words of a high-throughput handle: its route, for as many tokens as there may be, then the slots.
HtHandleShape most_of_ht(const OutputShape& output, const Topology& topology) {
  const int64_t num_slots = static_cast<int64_t>(output.num_ranks) * output.max_tokens;
  return HtHandleShape::make(output, topology, output.max_tokens, num_slots);
}

HandleSizes sizes_of(const GroupState& state, const ncclEpHandleConfig_t& config) {
  const ncclEpGroupConfig_t& group = state.config;
  check_reserved(config);
  const int topk = config.topk == 0 ? group.topk : config.topk;
  EP_CHECK(topk >= 1 && topk <= group.topk, "topk is ", topk, ", must be 1 to the group's ", group.topk);
  const OutputLayout layout = to_layout(config.layout);
  const int alignment = config.expert_alignment == 0 ? 1 : config.expert_alignment;
  const int max_tokens = config.max_tokens == 0 ? group.max_tokens : config.max_tokens;
  EP_CHECK(max_tokens >= 1 && max_tokens <= group.max_tokens, "max_tokens is ", max_tokens,
           ", must be 1 to the group's ", group.max_tokens);
  HandleSizes sizes;
  const Group& ranks = state.get();
  sizes.shape = Shape::make(ranks.num_ranks(), group.num_experts, topk, max_tokens);
  sizes.is_ht = takes_ht(state, sizes.shape, config);
  sizes.is_exact = config.capacity == NCCL_EP_CAPACITY_EXACT;
  const int64_t capacity = capacity_of(config, sizes.shape, layout, sizes.is_ht, alignment);
  sizes.output = OutputShape::make(sizes.shape, layout, capacity, alignment);
  int64_t words;
  if (sizes.is_ht) {
    const HtHandleShape handle = most_of_ht(sizes.output, ranks.topology());
    words = handle.route_size() + handle.num_slots * handle.slot_words();
  } else {
    words = HandleShape::of(sizes.output, max_tokens).size();
  }
  sizes.bytes = words * static_cast<int64_t>(sizeof(int32_t));
  return sizes;
}

void update(ncclEpHandle& handle, const ncclEpTensor_t* topk_idx) {
  handle.state->get();
  const Tensor ids = take_tensor(topk_idx, "topk_idx");
  EP_CHECK(ids.sizes.ndim == 2 && ids.sizes.at[1] == handle.shape.topk, "topk_idx has shape ", text_of(ids.sizes),
           ", must be [tokens, ", handle.shape.topk, "]");
  check_id_type(ids);
  EP_CHECK(ids.sizes.at[0] <= handle.shape.max_tokens, ids.sizes.at[0], " tokens, but max_tokens is ",
           handle.shape.max_tokens);
  check_contiguous(ids, "topk_idx");
  check_data(ids, "topk_idx");
  handle.topk_idx = ids.data;
  handle.is_idx64 = ids.dtype == NCCL_EP_INT64;
  handle.given_tokens = static_cast<int>(ids.sizes.at[0]);
  handle.is_routed = false;
}

ncclEpLayout_t layout_of(OutputLayout layout) {
  for (ncclEpLayout_t each = NCCL_EP_LAYOUT_EXPERT_MAJOR; each < NCCL_EP_LAYOUT_FLAT; each++) {
    if (to_layout(each) == layout) return each;
  }
  return NCCL_EP_LAYOUT_FLAT;
}

std::unique_ptr<ncclEpHandle> make_handle(ncclEpGroup_t group, const ncclEpHandleConfig_t* config, void* memory) {
  const std::shared_ptr<GroupState> state = state_of(group);
  const HandleSizes sizes = sizes_of(*state, take(config, "config"));
  EP_CHECK(reinterpret_cast<uintptr_t>(memory) % 16 == 0, "handle_mem at address ", memory,
           " is not aligned to 16 bytes");
  auto handle = std::make_unique<ncclEpHandle>();
  handle->state = state;
  handle->shape = sizes.shape;
  handle->output = sizes.output;
  handle->is_ht = sizes.is_ht;
  handle->is_exact = sizes.is_exact;
  handle->memory = static_cast<int32_t*>(memory == nullptr ? allocate(state->config.device, sizes.bytes) : memory);
  handle->memory_bytes = static_cast<uint64_t>(sizes.bytes);
  handle->owns_memory = memory == nullptr;
  add_live(handle.get(), ObjectKind::kHandle);
  return handle;
}

}  // namespace

ncclEpHandle& object_of(ncclEpHandle_t handle) {
  require_live(handle, ObjectKind::kHandle);
  return *handle;
}

}  // namespace ep::c

using namespace ep;
using namespace ep::c;

ncclEpHandle::~ncclEpHandle() {
  if (owns_memory) release(device(), memory);
}

HandlePtrs ncclEpHandle::pointers(int num_tokens) const {
  return HandlePtrs::of(memory, HandleShape::of(output, num_tokens));
}

HtHandlePtrs ncclEpHandle::ht_pointers(int num_tokens) const {
  const Topology& topology = state->get().topology();
  const HtHandleShape most = most_of_ht(output, topology);
  return HtHandlePtrs::of(memory, memory + most.route_size(),
                          HtHandleShape::make(output, topology, num_tokens, most.num_slots));
}

Extent ncclEpHandle::ids_extent() const {
  const uint64_t element_bytes = is_idx64 ? sizeof(int64_t) : sizeof(int32_t);
  return {topk_idx, static_cast<uint64_t>(given_tokens) * shape.topk * element_bytes, nullptr, 0};
}

int ncclEpHandle::num_sms(int asked) const {
  EP_CHECK(asked >= 0, "num_sms is ", asked, ", must not be negative");
  return asked == 0 ? state->config.max_num_sms : asked;
}

void ncclEpHandle::require_nothing_pending() const {
  EP_CHECK_USAGE(pending == Pending::kNothing, "with this handle a ",
                 pending == Pending::kDispatch ? "dispatch" : "combine",
                 " was sent and has not been received; ncclEpComplete receives it");
}

void ncclEpHandle::require_dispatched() const {
  require_nothing_pending();
  EP_CHECK_USAGE(dispatched_tokens >= 0, "nothing was dispatched with this handle yet");
}

void ncclEpHandle::require_rows(bool is_cached) const {
  if (is_cached) return require_dispatched();
  EP_CHECK_USAGE(rows_are_known(), "the handle's sizes are exact, but not known before ncclEpRouteHandle");
}

void ncclEpHandle::require_given() const {
  EP_CHECK_USAGE(given_tokens >= 0, "the handle has no routing yet: ncclEpUpdateHandle gives it");
}

extern "C" {

ncclEpResult_t ncclEpHandleMemSize(ncclEpGroup_t group, const ncclEpHandleConfig_t* config, size_t* bytes) {
  return guarded("ncclEpHandleMemSize", [&] {
    EP_CHECK(bytes != nullptr, "bytes is null");
    *bytes = static_cast<size_t>(sizes_of(*state_of(group), take(config, "config")).bytes);
  });
}

ncclEpResult_t ncclEpInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, const ncclEpHandleConfig_t* config,
                                void* handle_mem) {
  return guarded("ncclEpInitHandle", [&] {
    EP_CHECK(handle != nullptr, "handle is null");
    *handle = make_handle(group, config, handle_mem).release();
  });
}

ncclEpResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx) {
  return guarded("ncclEpUpdateHandle", [&] { update(object_of(handle), topk_idx); });
}

ncclEpResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, const ncclEpHandleConfig_t* config,
                                  const ncclEpTensor_t* topk_idx, void* handle_mem) {
  // Through the functions that users call, so that the text names the step that was refused.
  ncclEpHandle_t made = nullptr;
  if (handle == nullptr) return ncclEpInitHandle(nullptr, group, config, handle_mem);
  ncclEpResult_t result = ncclEpInitHandle(&made, group, config, handle_mem);
  if (result == NCCL_EP_SUCCESS) result = ncclEpUpdateHandle(made, topk_idx);
  if (result == NCCL_EP_SUCCESS) {
    *handle = made;
  } else {
    ncclEpHandleDestroy(made);
  }
  return result;
}

ncclEpResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
  return guarded("ncclEpHandleDestroy", [&] {
    if (handle == nullptr) return;
    const ncclEpHandle& object = object_of(handle);
    const Group& group = *object.state->group;
    if (!group.is_destroyed() && group.backend()->failure().code == Failure::kNone) object.require_nothing_pending();
    remove_live(handle, ObjectKind::kHandle);
    delete handle;
  });
}

ncclEpResult_t ncclEpHandleGetInfo(ncclEpHandle_t handle, ncclEpHandleInfo_t* info) {
  return guarded("ncclEpHandleGetInfo", [&] {
    const ncclEpHandle& object = object_of(handle);
    ncclEpHandleInfo_t full = take(info, "info");
    full.layout = layout_of(object.output.layout);
    full.topk = object.shape.topk;
    full.max_tokens = object.shape.max_tokens;
    full.expert_alignment = object.output.alignment;
    full.algorithm = object.is_ht ? NCCL_EP_ALGORITHM_HIGH_THROUGHPUT : NCCL_EP_ALGORITHM_LOW_LATENCY;
    full.capacity = object.rows_are_known() ? object.output.capacity : NCCL_EP_CAPACITY_EXACT;
    give(info, full);
  });
}

}  // extern "C"
