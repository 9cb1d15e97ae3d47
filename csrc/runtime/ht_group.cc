// High throughput's part of the group: what follows from the rest of the parameters, and checks.
#include <algorithm>

#include "base/check.h"
#include "runtime/checks.h"
#include "runtime/group.h"
#include "runtime/handles.h"
#include "runtime/observed.h"
#include "runtime/one_caller.h"

namespace ep {
namespace {

Operation operation_of(HtVariant variant) {
  switch (variant) {
    case HtVariant::kRouteAndSend:
      return Operation::kHtDispatch;
    case HtVariant::kRoute:
      return Operation::kHtRoute;
    case HtVariant::kSend:
      return Operation::kHtSend;
    default:
      return Operation::kHtCached;
  }
}

const char* name_of(HtVariant variant) {
  constexpr const char* kNames[] = {"ht dispatch", "ht route", "ht send", "ht cached dispatch"};
  return kNames[static_cast<int>(variant)];
}

void check_slots(int64_t num_slots, const Shape& shape) {
  const int64_t most = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
  EP_CHECK(num_slots >= 0 && num_slots <= most, "a handle of ", num_slots, " received rows, at most ", most);
}

}  // namespace

HtSizes ht_sizes_for(const Topology& topology, const Shape& shape, int dispatch_row_bytes, int combine_row_bytes,
                     uint64_t arena_bytes) {
  HtRowFormat dispatch, combine;
  dispatch.add(dispatch_row_bytes);
  combine.add(combine_row_bytes);
  combine.add(shape.topk * 4);  // scalars of weights
  HtSizes sizes = HtOffsets::sizes(topology, shape, dispatch.stride());
  const HtSizes back = HtOffsets::sizes(topology, shape, combine.stride());
  sizes.row_bytes = std::max(sizes.row_bytes, back.row_bytes);
  sizes.rail_bytes = std::max(sizes.rail_bytes, back.rail_bytes);
  sizes.arena_bytes = arena_bytes;
  return sizes;
}

Offset Group::offset_of(const void* data, uint64_t bytes) const {
  const auto arena = this->arena();
  return arena == nullptr || bytes == 0 ? kNoOffset : arena->offset_of(data, bytes);
}

std::shared_ptr<Backend> Group::begin_ht() {
  std::shared_ptr<Backend> backend = usable_backend();
  EP_CHECK(has_ht(), "the buffer was made without room for high throughput: make it with mode=\"ht\" or \"auto\"");
  return backend;
}

void Group::prepare(HtDispatchParams& p) {
  const std::shared_ptr<Backend> backend = begin_ht();
  // A send is the second part of a dispatch of all ranks.
  if (p.variant != HtVariant::kSend) require_valid_ids(*backend);
  p.options.check(Modes::kHt);
  p.shape = own_shape(p.shape);
  // Counts may be of any number of tokens: then all ranks see that it is too much for one of them.
  if (p.variant != HtVariant::kRoute) check_tokens(p.num_tokens, p.shape);
  check_output(p.output);
  EP_CHECK(p.num_parts >= 1 && p.num_parts <= kHtMaxParts, p.num_parts, " tensors and scales, must be 1 to ",
           kHtMaxParts);
  check_quant(p.options.quant, p.dtype, p.hidden);
  EP_CHECK(
      !is_swizzled(p.options.quant), "quant is ", name_of(p.options.quant),
      ", which low latency alone has: in high throughput rows lie at their places when they come, with plain scales");
  check_row_bytes(p.parts[0].bytes, "a row");
  HtRowFormat row;
  uint32_t extra_bytes = 0, order = 0;
  for (int i = 0; i < p.num_parts; i++) {
    EP_CHECK(p.parts[i].bytes > 0 && p.parts[i].bytes <= kMaxRowBytes, "tensor ", i, " has rows of ", p.parts[i].bytes,
             " bytes, must be 1 to ", kMaxRowBytes);
    if (i > 0) extra_bytes += p.parts[i].bytes;
    if (i > 0 && p.num_parts > 2) order = OpHeader::hash_order(order, p.parts[i].bytes);
    row.add(p.parts[i].bytes);
  }
  p.offsets = with_room([&] { return HtOffsets::make(window_.ht, Kind::kDispatch, topology_, p.shape, row); });
  p.header = header_of(pack_operation(operation_of(p.variant), p.dtype, p.options.quant, p.dtype), p.hidden, p.shape,
                       static_cast<int>(extra_bytes | order << OpHeader::kMetadataBits), p.num_tokens);
}

void Group::dispatch(HtDispatchParams& p, void* stream) {
  prepare(p);
  run(p, stream);
}

void Group::run(HtDispatchParams& p, void* stream) {
  const OneCaller one_caller(is_called_);
  const std::shared_ptr<Backend> backend = this->backend();
  if (routes(p.variant)) check_ids(*backend, p.shape, p.topk_idx, p.is_idx64, p.num_tokens);
  for (int i = 0; i < p.num_parts && sends_rows(p.variant); i++) {
    p.parts[i].out_offset = offset_of(p.parts[i].out, static_cast<uint64_t>(p.output.rows()) * p.parts[i].bytes);
  }
  if (sends_rows(p.variant)) check_slots(p.handle.num_slots, p.shape);
  if (sends_rows(p.variant) && !routes(p.variant) && backend->trusts_handles()) {
    check_handle(p.handle, p.output, p.shape, topology_, p.num_tokens, rank_, sends_metadata(p.variant));
  }
  Observation seen = Observation::of(*this, name_of(p.variant), ++calls_.ht[static_cast<int>(Kind::kDispatch)], p.shape,
                                     p.num_tokens, p.hidden, stream);
  if (sends_rows(p.variant)) {
    seen.row_bytes = p.offsets.row.body_bytes;
    seen.ids = routes(p.variant) ? p.topk_idx : p.handle.own.ids;
    seen.is_idx64 = routes(p.variant) && p.is_idx64;
  }
  seen.has_own_times = backend->has_own_times();
  seen.has_own_counts = seen.has_own_times && p.variant == HtVariant::kRouteAndSend;
  const Observed observed(seen);
  p.recorded = observed.words();
  backend->ht_dispatch(p, stream);
}

// Kernels wait for them while they add up the rows of a token, for ranks of one domain to read.
void Group::check_signals(const HtCombineParams& p) const {
  if (p.signals.counters == nullptr) return;
  EP_CHECK(p.dtype == p.options.wire_dtype && p.dtype == p.options.out_dtype,
           "row_signals are for rows, sums and outputs of one type: rows are ", name_of(p.dtype), ", the wire ",
           name_of(p.options.wire_dtype), ", outputs ", name_of(p.options.out_dtype), ", must be of one type");
  EP_CHECK(!config_.has_rail || topology_.num_domains() == 1, "the ranks' GPUs are in ", topology_.num_domains(),
           " NVLink domains, between which row_signals are not served");
  check_sms_beside_writer(p.options);
}

void Group::combine(HtCombineParams& p, void* stream) {
  const OneCaller one_caller(is_called_);
  const std::shared_ptr<Backend> backend = begin_ht();
  require_valid_ids(*backend);
  p.options.check(Modes::kHt);
  p.shape = own_shape(p.shape);
  check_tokens(p.num_tokens, p.shape);
  check_slots(p.handle.num_slots, p.shape);
  if (backend->trusts_handles()) check_handle(p.handle, p.output, p.shape, topology_, p.num_tokens, rank_, false);
  HtRowFormat row;
  if (p.has_rows()) {
    check_combined_rows(p);
    check_signals(p);
    row.add(wire_row_bytes(p.options.wire_dtype, p.hidden));
    p.rows_offset =
        offset_of(p.rows, static_cast<uint64_t>(p.output.rows()) * p.hidden * static_cast<uint64_t>(size_of(p.dtype)));
  }
  if (p.has_values) row.add(p.shape.topk * 4);
  EP_CHECK(row.num_parts > 0, "a combine of neither rows nor scalars");
  p.offsets = with_room([&] { return HtOffsets::make(window_.ht, Kind::kCombine, topology_, p.shape, row); });
  const Operation operation = !p.has_rows()                             ? Operation::kHtCombineWeights
                              : p.options.weighting == Weighting::kHome ? Operation::kHtCombineWeighted
                                                                        : Operation::kHtCombine;
  p.header = header_of(pack_operation(operation, p.dtype, Quant::kNone, p.options.wire_dtype), p.hidden, p.shape,
                       p.has_values ? p.shape.topk * 4 : 0, p.num_tokens);
  Observation seen = Observation::of(*this, "ht combine", ++calls_.ht[static_cast<int>(Kind::kCombine)], p.shape,
                                     p.num_tokens, p.hidden, stream);
  seen.is_home_bound = true;
  seen.row_bytes = row.body_bytes;
  seen.rows = p.handle.counts + static_cast<int64_t>(rank_) * num_ranks();
  seen.has_own_times = seen.has_own_counts = backend->has_own_times();
  const Observed observed(seen);
  p.recorded = observed.words();
  backend->ht_combine(p, stream);
}

}  // namespace ep
