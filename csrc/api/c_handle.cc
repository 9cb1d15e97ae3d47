// Handles of the C API: memory, sizes, and what was routed with them.
#include <algorithm>
#include <bit>

#include "api/c_dispatch.h"
#include "api/c_live.h"
#include "api/c_objects.h"
#include "api/c_struct.h"
#include "api/c_tensor.h"
#include "base/math.h"
#include "runtime/call.h"

namespace ep::c {
namespace {

OutputLayout to_layout(ncclEpxLayout_t layout) {
  switch (layout) {
    case NCCL_EPX_LAYOUT_EXPERT_MAJOR:
      return OutputLayout::kExpertMajor;
    case NCCL_EPX_LAYOUT_PACKED:
      return OutputLayout::kPacked;
    case NCCL_EPX_LAYOUT_RANK_MAJOR:
      return OutputLayout::kRankMajor;
    case NCCL_EPX_LAYOUT_FLAT:
      return OutputLayout::kFlat;
    case 0:
      raise(ErrorKind::kInvalidArgument, "layout is not set");
    default:
      raise(ErrorKind::kInvalidArgument, "layout ", layout, " is unknown");
  }
}

// NCCL EP's layouts, of which each algorithm has two.
OutputLayout to_layout(const ncclEpLayout_t& given, bool is_ht) {
  const uint32_t layout = choice_of(given, NCCL_EP_LAYOUT_FLAT, "layout");
  EP_CHECK(layout != NCCL_EP_LAYOUT_UNSET, "layout is not set");
  if (layout == NCCL_EP_LAYOUT_EXPERT_MAJOR) return is_ht ? OutputLayout::kPacked : OutputLayout::kExpertMajor;
  EP_CHECK(layout == (is_ht ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_RANK_MAJOR), "layout is ",
           layout == NCCL_EP_LAYOUT_FLAT ? "FLAT" : "RANK_MAJOR", ", but ",
           is_ht ? "high throughput has FLAT and EXPERT_MAJOR" : "low latency has EXPERT_MAJOR and RANK_MAJOR",
           ": options of ncclEpxInitHandle have all layouts for both");
  return is_ht ? OutputLayout::kFlat : OutputLayout::kRankMajor;
}

struct HandleSizes {
  Shape shape;
  OutputShape output;
  bool is_ht, is_exact;
  int64_t bytes;  // whatever the number of tokens
};

// Of a handle whose sizes are `shape`.
bool takes_ht(const GroupState& state, const Shape& shape, const ncclEpxHandleOptions_t& config) {
  const ncclEpxAlgorithm_t of_group = state.config.algorithm;
  EP_CHECK(config.algorithm >= NCCL_EPX_ALGORITHM_AUTO && config.algorithm <= NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT,
           "algorithm ", config.algorithm, " is unknown");
  EP_CHECK(config.algorithm == NCCL_EPX_ALGORITHM_AUTO || of_group == NCCL_EPX_ALGORITHM_AUTO ||
               config.algorithm == of_group,
           "algorithm is ", config.algorithm, ", but the group was made with ", of_group,
           " alone: both_algorithms of ncclEpxGroupOptions_t makes room for both");
  const bool is_exact = config.capacity == NCCL_EPX_CAPACITY_EXACT;
  bool is_ht =
      (config.algorithm == NCCL_EPX_ALGORITHM_AUTO ? of_group : config.algorithm) == NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT;
  if (config.algorithm == NCCL_EPX_ALGORITHM_AUTO && of_group == NCCL_EPX_ALGORITHM_AUTO) {
    is_ht = is_exact || shape.max_tokens > state.ll_max_tokens;
  }
  EP_CHECK(is_ht || shape.max_tokens <= state.ll_max_tokens, "max_tokens is ", shape.max_tokens,
           ", but the group has room for low latency up to ", state.ll_max_tokens);
  return is_ht;
}

// Rows of the outputs; INT32_MAX until they are known: nothing is dropped.
int64_t capacity_of(const ncclEpxHandleOptions_t& config, const Shape& shape, OutputLayout layout, bool is_ht,
                    int alignment) {
  EP_CHECK(config.capacity == 0 || layout != OutputLayout::kRankMajor, "capacity is ", config.capacity,
           ", but layout rank_major always holds max_tokens rows of a rank");
  ep::DispatchCall call;
  call.mode = is_ht ? Mode::kHt : Mode::kLl;
  call.config.num_experts = shape.num_experts;
  call.config.topk = shape.topk;
  call.config.layout = layout;
  call.config.alignment = alignment;
  call.max_tokens = shape.max_tokens;
  call.is_exact = config.capacity == NCCL_EPX_CAPACITY_EXACT;
  if (config.capacity != 0) call.capacity = config.capacity;
  const int64_t rows = call.check(shape.num_ranks).capacity;
  return rows == kExactCapacity ? INT32_MAX : rows;
}

// The words of a high-throughput handle: its route, for as many tokens as there may be, then the slots.
HtHandleShape most_of_ht(const OutputShape& output, const Topology& topology) {
  const int64_t num_slots = static_cast<int64_t>(output.num_ranks) * output.max_tokens;
  return HtHandleShape::make(output, topology, output.max_tokens, num_slots);
}

int64_t bytes_of(const HandleSizes& sizes, const Topology& topology) {
  int64_t words;
  if (sizes.is_ht) {
    const HtHandleShape handle = most_of_ht(sizes.output, topology);
    words = handle.route_size() + handle.num_slots * handle.slot_words();
  } else {
    words = HandleShape::of(sizes.output, sizes.shape.max_tokens).size();
  }
  return words * static_cast<int64_t>(sizeof(int32_t));
}

// As options say.
HandleSizes sizes_of(const GroupState& state, const HandleRequest& request, const ncclEpxHandleOptions_t& options) {
  const GroupRequest& group = state.config;
  check_reserved(options);
  EP_CHECK(number_of(request.layout) == NCCL_EP_LAYOUT_UNSET, "layout is ", number_of(request.layout),
           ", must be NCCL_EP_LAYOUT_UNSET with options, which have a layout of their own");
  const int topk = request.num_topk <= 0 ? group.topk : request.num_topk;
  EP_CHECK(topk <= group.topk, "num_topk is ", topk, ", must be 1 to the group's ", group.topk);
  const OutputLayout layout = to_layout(options.layout);
  EP_CHECK(request.alignment <= INT32_MAX, "dispatch_output_per_expert_alignment is ", request.alignment, ", at most ",
           INT32_MAX);
  const int alignment = request.alignment == 0 ? 1 : static_cast<int>(request.alignment);
  const int max_tokens = options.max_tokens == 0 ? group.max_tokens : options.max_tokens;
  EP_CHECK(max_tokens >= 1 && max_tokens <= group.max_tokens, "max_tokens is ", max_tokens,
           ", must be 1 to the group's ", group.max_tokens);
  HandleSizes sizes;
  sizes.shape = Shape::make(state.get().num_ranks(), group.num_experts, topk, max_tokens);
  sizes.is_ht = takes_ht(state, sizes.shape, options);
  sizes.is_exact = options.capacity == NCCL_EPX_CAPACITY_EXACT;
  const int64_t capacity = capacity_of(options, sizes.shape, layout, sizes.is_ht, alignment);
  sizes.output = OutputShape::make(sizes.shape, layout, capacity, alignment);
  return sizes;
}

// That can come in high throughput, whatever the routing.
int64_t most_rows(const Shape& shape, OutputLayout layout, int alignment) {
  const int64_t tokens = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
  if (layout != OutputLayout::kPacked) return tokens;
  return tokens * shape.topk + static_cast<int64_t>(alignment) * shape.local_experts();
}

// As NCCL EP has it: the group's algorithm, and rows that its caller counts on.
HandleSizes sizes_of(const GroupState& state, const HandleRequest& request) {
  const GroupRequest& group = state.config;
  HandleSizes sizes;
  sizes.is_ht = group.is_ht;
  EP_CHECK(sizes.is_ht || group.max_tokens <= state.ll_max_tokens, "max_dispatch_tokens_per_rank is ", group.max_tokens,
           ", but the group has room for low latency up to ", state.ll_max_tokens);
  const OutputLayout layout = to_layout(request.layout, sizes.is_ht);
  sizes.shape = Shape::make(state.get().num_ranks(), group.num_experts, request.num_topk, group.max_tokens);
  int alignment = 1;
  if (layout == OutputLayout::kPacked && request.alignment > 1) {
    EP_CHECK(request.alignment <= 1 << 20 && std::has_single_bit(request.alignment),
             "dispatch_output_per_expert_alignment is ", request.alignment, ", must be a power of two up to ", 1 << 20);
    alignment = static_cast<int>(request.alignment);
  }
  sizes.is_exact = sizes.is_ht && group.max_recv == 0;
  EP_CHECK_USAGE(!sizes.is_exact || layout != OutputLayout::kPacked || !group.may_grow,
                 "max_recv_tokens_per_rank is AUTO and the layout EXPERT_MAJOR, which needs num_topk in the group's "
                 "config");
  const int64_t always = static_cast<int64_t>(sizes.shape.num_ranks) * group.max_tokens;
  int64_t capacity = sizes.is_exact ? INT32_MAX : std::min(group.max_recv, most_rows(sizes.shape, layout, alignment));
  if (!sizes.is_ht) capacity = layout == OutputLayout::kExpertMajor ? always : group.max_tokens;
  sizes.output = OutputShape::make(sizes.shape, layout, capacity, alignment);
  return sizes;
}

// A handle of NCCL EP's by a K that it may have.
int plain_topk(const GroupState& state, int num_topk, bool for_size) {
  const GroupRequest& group = state.config;
  const bool is_ht = group.is_ht;
  const int most = std::min(kMaxTopk, std::max(group.num_experts, 1));
  if (num_topk <= 0) {
    EP_CHECK(is_ht, "num_topk is ", num_topk, ", must be 1 to ", most);
    if (!group.may_grow) return group.topk;
    EP_CHECK_USAGE(for_size, "num_topk is ", num_topk,
                   ", and the group's config has none: pass it to ncclEpInitHandle");
    return most;
  }
  EP_CHECK(num_topk <= most || num_topk <= group.topk, "num_topk is ", num_topk, ", must be 1 to ", most);
  EP_CHECK_USAGE(num_topk <= group.topk || group.may_grow, "num_topk is ", num_topk, ", but the group's config has ",
                 group.topk);
  return num_topk;
}

HandleRequest take_request(const ncclEpLayout_t& layout, const ncclEpHandleConfig_t* config, int num_topk,
                           const ncclEpxHandleOptions_t* options) {
  HandleRequest request;
  std::memcpy(&request.layout, &layout, sizeof layout);
  request.alignment = take_or_default(config, "config").dispatch_output_per_expert_alignment;
  request.num_topk = num_topk;
  if (options != nullptr) request.options = take(options, "options");
  return request;
}

HandleSizes sizes_of(const GroupState& state, HandleRequest request, bool for_size) {
  HandleSizes sizes;
  if (request.options) {
    sizes = sizes_of(state, request, *request.options);
  } else {
    request.num_topk = plain_topk(state, request.num_topk, for_size);
    sizes = sizes_of(state, request);
  }
  sizes.bytes = bytes_of(sizes, state.get().topology());
  return sizes;
}

// Room for what NCCL EP's callers do not ask for.
Scratch make_scratch(const GroupState& state, const HandleSizes& sizes) {
  const OutputShape& output = sizes.output;
  const bool is_packed = output.layout == OutputLayout::kPacked;
  const int64_t rows = sizes.is_ht ? most_rows(sizes.shape, output.layout, output.alignment) : output.rows();
  const int64_t entries = has_expert_rows(output.layout) ? rows : rows * output.topk;
  const auto step = [](int64_t bytes) { return align_up<int64_t>(bytes, 64); };
  const int64_t info = step(output.info_size() * int64_t{4}), weights = step(entries * 4);
  const int64_t experts = is_packed ? step(rows * 4) : 0;
  const int64_t ids = has_expert_rows(output.layout) ? 0 : step(entries * 8);
  Scratch scratch;
  scratch.rows = rows;
  scratch.memory = static_cast<char*>(state.allocate_own(static_cast<size_t>(info + weights + experts + ids)));
  scratch.info = reinterpret_cast<int32_t*>(scratch.memory);
  scratch.weights = reinterpret_cast<float*>(scratch.memory + info);
  scratch.row_expert = is_packed ? reinterpret_cast<int32_t*>(scratch.memory + info + weights) : nullptr;
  scratch.ids = ids > 0 ? scratch.memory + info + weights + experts : nullptr;
  return scratch;
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
  handle.is_idx64 = ids.dtype == ncclInt64;
  handle.given_tokens = static_cast<int>(ids.sizes.at[0]);
  handle.is_routed = false;
}

ncclEpxLayout_t layout_of(OutputLayout layout) {
  for (ncclEpxLayout_t each = NCCL_EPX_LAYOUT_EXPERT_MAJOR; each < NCCL_EPX_LAYOUT_FLAT; each++) {
    if (to_layout(each) == layout) return each;
  }
  return NCCL_EPX_LAYOUT_FLAT;
}

// Memory of a caller's for a handle; null: there is none.
void* take_memory(const ncclEpTensor_t* given, int64_t bytes) {
  const Tensor memory = take_tensor(given, "handle_mem");
  if (!memory) return nullptr;
  EP_CHECK(memory.sizes.ndim == 1 && memory.dtype == ncclUint8, "handle_mem is ", name_of(memory.dtype), " ",
           text_of(memory.sizes), ", must be uint8 of one dimension");
  EP_CHECK(memory.sizes.at[0] >= bytes, "handle_mem has ", memory.sizes.at[0], " bytes, must have ", bytes);
  EP_CHECK(memory.data != nullptr, "handle_mem has no data");
  EP_CHECK(reinterpret_cast<uintptr_t>(memory.data) % 16 == 0, "handle_mem at address ", memory.data,
           " is not aligned to 16 bytes");
  return memory.data;
}

ncclEpHandle_t make_handle(ncclEpGroup_t group, const HandleRequest& request, const ncclEpTensor_t* given_memory) {
  const std::shared_ptr<GroupState> state = state_of(group);
  state->get();
  const WindowScope windows(state->comm);
  const HandleSizes sizes = sizes_of(*state, request, false);
  void* const memory = take_memory(given_memory, sizes.bytes);
  if (!request.options && sizes.shape.topk > state->config.topk) state->grow(sizes.shape.topk);
  auto handle = std::make_unique<ncclEpHandle>();
  handle->state = state;
  handle->shape = sizes.shape;
  handle->output = sizes.output;
  handle->is_ht = sizes.is_ht;
  handle->is_exact = sizes.is_exact;
  handle->is_plain = !request.options;
  handle->memory_bytes = static_cast<uint64_t>(sizes.bytes);
  handle->owns_memory = memory == nullptr;
  handle->memory = static_cast<int32_t*>(memory == nullptr ? state->allocate_own(sizes.bytes) : memory);
  if (handle->is_plain) handle->scratch = make_scratch(*state, sizes);
  add_live(handle.get(), ObjectKind::kHandle);
  return handle.release();
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
  if (owns_memory) state->release_own(memory);
  state->release_own(scratch.memory);
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
  EP_CHECK_USAGE(rows_are_known(), "the handle's sizes are exact, but not known before ncclEpxRouteHandle");
}

void ncclEpHandle::require_given() const {
  EP_CHECK_USAGE(given_tokens >= 0, "the handle has no routing yet: ncclEpUpdateHandle gives it");
}

namespace {

void mem_size(ncclEpGroup_t group, const HandleRequest& request, size_t* bytes) {
  EP_CHECK(bytes != nullptr, "size_out is null");
  *bytes = static_cast<size_t>(sizes_of(*state_of(group), request, true).bytes);
}

void init_handle(ncclEpHandle_t* handle, ncclEpGroup_t group, const HandleRequest& request,
                 const ncclEpTensor_t* memory) {
  EP_CHECK(handle != nullptr, "handle is null");
  *handle = make_handle(group, request, memory);
}

}  // namespace

extern "C" {

ncclResult_t ncclEpHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config,
                                 size_t* bytes, int num_topk) {
  return guarded("ncclEpHandleMemSize",
                 [&] { mem_size(group, take_request(layout, config, num_topk, nullptr), bytes); });
}

ncclResult_t ncclEpxHandleMemSize(ncclEpGroup_t group, ncclEpLayout_t layout, const ncclEpHandleConfig_t* config,
                                  size_t* bytes, int num_topk, const ncclEpxHandleOptions_t* options) {
  return guarded("ncclEpxHandleMemSize",
                 [&] { mem_size(group, take_request(layout, config, num_topk, options), bytes); });
}

ncclResult_t ncclEpInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                              const ncclEpHandleConfig_t* config, int num_topk, const ncclEpTensor_t* memory) {
  return guarded("ncclEpInitHandle",
                 [&] { init_handle(handle, group, take_request(layout, config, num_topk, nullptr), memory); });
}

ncclResult_t ncclEpxInitHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                               const ncclEpHandleConfig_t* config, int num_topk, const ncclEpTensor_t* memory,
                               const ncclEpxHandleOptions_t* options) {
  return guarded("ncclEpxInitHandle",
                 [&] { init_handle(handle, group, take_request(layout, config, num_topk, options), memory); });
}

ncclResult_t ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t* topk_idx,
                                const ncclEpLayoutInfo_t* layout_info, cudaStream_t stream) {
  return guarded("ncclEpUpdateHandle", [&] {
    ncclEpHandle& object = object_of(handle);
    object.state->get();
    const WindowScope windows(object.state->comm);
    const auto info = take_or_default(layout_info, "layout_info");
    const bool routes = object.is_plain && object.is_ht;
    EP_CHECK(routes || layout_info == nullptr, "layout_info is given, but this handle ",
             object.is_plain ? "is of low latency, whose dispatch fills it" : "has options, and ids only");
    if (routes) object.require_nothing_pending();
    const LayoutInfoParams counters = routes ? take_counters(object, info) : LayoutInfoParams{};
    update(object, topk_idx);
    if (routes) route_plain(object, counters, stream);
  });
}

ncclResult_t ncclEpCreateHandle(ncclEpHandle_t* handle, ncclEpGroup_t group, ncclEpLayout_t layout,
                                const ncclEpTensor_t* topk_idx, const ncclEpLayoutInfo_t* layout_info,
                                const ncclEpHandleConfig_t* config, cudaStream_t stream) {
  // Through the functions that users call, so that the text names the step that was refused.
  int num_topk = 0;
  ncclResult_t result = guarded("ncclEpCreateHandle", [&] {
    EP_CHECK(handle != nullptr, "handle is null");
    const Tensor ids = take_tensor(topk_idx, "topk_idx");
    EP_CHECK(ids.sizes.ndim == 2 && ids.sizes.at[1] >= 1 && ids.sizes.at[1] <= kMaxTopk, "topk_idx has shape ",
             text_of(ids.sizes), ", must be [tokens, 1 to ", kMaxTopk, "]");
    num_topk = static_cast<int>(ids.sizes.at[1]);
  });
  if (result != ncclSuccess) return result;
  ncclEpHandle_t made = nullptr;
  result = ncclEpInitHandle(&made, group, layout, config, num_topk, nullptr);
  if (result == ncclSuccess) result = ncclEpUpdateHandle(made, topk_idx, layout_info, stream);
  if (result == ncclSuccess) {
    *handle = made;
  } else if (made != nullptr) {
    remove_live(made, ObjectKind::kHandle);
    delete made;
  }
  return result;
}

ncclResult_t ncclEpHandleDestroy(ncclEpHandle_t handle) {
  return guarded("ncclEpHandleDestroy", [&] {
    if (handle == nullptr) return;
    const ncclEpHandle& object = object_of(handle);
    const Group& group = *object.state->group;
    if (!group.is_destroyed() && group.backend()->failure().code == Failure::kNone) object.require_nothing_pending();
    remove_live(handle, ObjectKind::kHandle);
    delete handle;
  });
}

ncclResult_t ncclEpxHandleGetInfo(ncclEpHandle_t handle, ncclEpxHandleInfo_t* info) {
  return guarded("ncclEpxHandleGetInfo", [&] {
    const ncclEpHandle& object = object_of(handle);
    auto full = take(info, "info");
    full.layout = layout_of(object.output.layout);
    full.topk = object.shape.topk;
    full.max_tokens = object.shape.max_tokens;
    full.alignment = object.output.alignment;
    full.algorithm = object.is_ht ? NCCL_EPX_ALGORITHM_HIGH_THROUGHPUT : NCCL_EPX_ALGORITHM_LOW_LATENCY;
    full.capacity = object.rows_are_known() ? object.output.capacity : NCCL_EPX_CAPACITY_EXACT;
    give(info, full);
  });
}

}  // extern "C"
