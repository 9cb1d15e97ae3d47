#include "runtime/call.h"

#include "base/check.h"
#include "runtime/checks.h"
#include "runtime/policy.h"

namespace ep {

bool auto_is_ht(int64_t max_tokens, int64_t row_bytes, int64_t topk, int64_t num_ranks,
                std::optional<int64_t> ll_max_tokens) {
  return max_tokens > most_auto_ll_tokens(row_bytes, topk, num_ranks) ||
         max_tokens > ll_max_tokens.value_or(INT64_MAX);  // rows are smaller, or choices fewer, than it was made for
}

DispatchCall::Checked DispatchCall::check(int num_ranks) const {
  const OutputLayout layout = config.layout;
  EP_CHECK(max_tokens, "max_tokens is not given, and the buffer was made without it");
  EP_CHECK(config.num_experts >= 1 && config.num_experts % num_ranks == 0, "num_experts is ", config.num_experts,
           ", and ", config.num_experts, " experts do not divide over ", num_ranks, " ranks");
  EP_CHECK(config.alignment == 1 || layout == OutputLayout::kPacked, "expert_alignment is ", config.alignment,
           ", but layout ", name_of(layout), " has no alignment");
  EP_CHECK(config.alignment >= 1, "expert_alignment is ", config.alignment, ", must be at least 1");
  Checked checked{mode == Mode::kHt, 0, config};
  if (mode == Mode::kAuto) {
    checked.is_ht = is_exact || auto_is_ht(*max_tokens, row_bytes, config.topk, num_ranks, ll_max_tokens);
  }
  checked.config.max_tokens = *max_tokens;
  checked.capacity = check_capacity(checked.is_ht, num_ranks, checked.config);
  return checked;
}

int64_t DispatchCall::check_capacity(bool is_ht, int num_ranks, const DispatchConfig& checked) const {
  const OutputLayout layout = config.layout;
  if (is_exact) {
    EP_CHECK(is_ht && layout != OutputLayout::kExpertMajor,
             "capacity \"exact\" is for high throughput and not for expert_major: mode is \"",
             kModeNames[is_ht ? 1 : 0], "\", layout \"", name_of(layout), "\"");
    return kExactCapacity;
  }
  if (!capacity) {
    EP_CHECK(!is_ht || layout != OutputLayout::kExpertMajor,
             "layout expert_major needs a capacity in high throughput: give capacity=, rows of an expert at most, or "
             "layout=\"packed\"");
    return default_capacity_of(num_ranks, checked);
  }
  EP_CHECK(*capacity >= 0, "capacity is ", *capacity, ", must not be negative");
  EP_CHECK(layout != OutputLayout::kRankMajor, "capacity is ", *capacity,
           ", but layout rank_major always holds max_tokens rows of a rank");
  return *capacity;
}

int64_t default_capacity_of(int num_ranks, const RoutingNumbers& routing) {
  const Shape shape = Shape::make(num_ranks, to_int(routing.num_experts, "num_experts"), to_int(routing.topk, "top-k"),
                                  to_int(routing.max_tokens, "max_tokens"));
  return default_capacity(routing.layout, shape, routing.alignment);
}

}  // namespace ep
