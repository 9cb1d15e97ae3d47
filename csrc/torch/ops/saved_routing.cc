#include "torch/ops/saved_routing.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "layout/ht/handle.h"
#include "torch/ops/arguments.h"
#include "torch/ops/op_types.h"

namespace ep {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;

namespace {

constexpr int64_t kRowBytes = 16;  // that rows are a multiple of

bool can_be_summed(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

}  // namespace

void SavedRouting::save(AutogradContext* ctx, at::ArrayRef<Tensor> more) const {
  torch::autograd::variable_list tensors{seq, handle};
  c10::List<bool> is_there;
  is_there.push_back(slots.defined());
  if (slots.defined()) tensors.push_back(slots);
  for (const Tensor& each : more) {  // torch saves no undefined ones
    is_there.push_back(each.defined());
    if (each.defined()) tensors.push_back(each);
  }
  ctx->save_for_backward(std::move(tensors));
  ctx->saved_data["is_there"] = is_there;
  const auto packed = numbers.pack();
  ctx->saved_data["routing"] = std::vector<int64_t>(packed.begin(), packed.end());
  ctx->saved_data["num_tokens"] = num_tokens;
  ctx->saved_data["capacity"] = capacity;
}

std::pair<SavedRouting, std::vector<Tensor>> SavedRouting::load(AutogradContext* ctx) {
  const torch::autograd::variable_list saved = ctx->get_saved_variables();
  const auto is_there = ctx->saved_data["is_there"].toBoolList();
  std::vector<Tensor> more;
  auto next = saved.begin() + 2;
  for (const bool each : is_there) more.push_back(each ? *next++ : Tensor());
  const std::vector<int64_t> numbers = ctx->saved_data["routing"].toIntVector();
  SavedRouting routing{saved[0],
                       saved[1],
                       more[0],
                       ctx->saved_data["num_tokens"].toSymInt(),
                       ctx->saved_data["capacity"].toSymInt(),
                       RoutingNumbers::unpack(numbers.data())};
  more.erase(more.begin());
  return {std::move(routing), std::move(more)};
}

CombineConfig SavedRouting::combine_config(at::ScalarType type) const {
  const DType dtype = dtype_of(type);
  return {numbers, {.out_dtype = dtype, .wire_dtype = dtype}};
}

DispatchConfig SavedRouting::dispatch_config() const {
  return {numbers, {.zero_padding = true}};  // what does not exist adds nothing to the gradients of experts
}

Tensor SavedRouting::expert_ids() const {
  const int num_ranks = static_cast<int>(seq.sym_size(1).guard_int(__FILE__, __LINE__));
  const int domain_size = static_cast<int>(seq.sym_size(2).guard_int(__FILE__, __LINE__));
  const OutputShape output = output_shape(num_ranks, numbers, 1);
  const int64_t at = is_ht() ? HtHandleShape::make(output, Topology::make(num_ranks, domain_size), 0, 0).ids_at()
                             : HandleShape::of(output, 0).ids_at();
  return handle.narrow_symint(0, at, num_tokens * numbers.topk).view_symint({num_tokens, numbers.topk});
}

// ---- To the home ranks

Tensor SavedRouting::combine_rows(const Tensor& given) const {
  EP_CHECK(can_be_summed(given.scalar_type()), "a gradient of ", name_of(given.scalar_type()),
           " rows: only those of bf16, fp16 and fp32 can be added up");
  const int64_t unit = kRowBytes / static_cast<int64_t>(given.element_size());
  const SymInt length = given.sym_size(-1);
  if (TORCH_GUARD_OR_FALSE((length % unit).sym_ne(0))) {  // of scales
    const SymInt padding = unit - length % unit;
    return combine_rows(at::constant_pad_nd_symint(given, {0, padding}, 0)).narrow_symint(1, 0, length);
  }
  const Tensor rows = given.contiguous();
  const auto config = combine_config(rows.scalar_type()).pack();
  if (!is_ht()) return torch_ops::ll_combine().call(seq, rows, handle, {}, {}, {}, num_tokens, capacity, config);
  return std::get<0>(
      torch_ops::ht_combine().call(seq, rows, {}, handle, slots, {}, {}, {}, num_tokens, capacity, config));
}

Tensor SavedRouting::combine_scalars(const Tensor& given) const {
  const Tensor values = given.contiguous();
  const auto config = combine_config(at::kFloat).pack();
  if (!is_ht()) return torch_ops::ll_combine_weights().call(seq, values, handle, num_tokens, capacity, config);
  return std::get<1>(
      torch_ops::ht_combine().call(seq, {}, values, handle, slots, {}, {}, {}, num_tokens, capacity, config));
}

std::pair<Tensor, Tensor> SavedRouting::combine_both(const Tensor& rows, const Tensor& values) const {
  if (!is_ht()) {
    Tensor sums = combine_rows(rows);
    return {std::move(sums), combine_scalars(values)};
  }
  const auto config = combine_config(rows.scalar_type()).pack();
  auto [sums, scalars] = torch_ops::ht_combine().call(seq, rows.contiguous(), values.contiguous(), handle, slots, {},
                                                      {}, {}, num_tokens, capacity, config);
  return {std::move(sums), std::move(scalars)};
}

// ---- To the experts' ranks

Tensor SavedRouting::dispatch_rows(const Tensor& given) const {
  const Tensor x = given.contiguous();
  const auto config = dispatch_config().pack();
  if (is_ht()) {
    return std::get<0>(torch_ops::ht_dispatch_cached().call(seq, x, {}, handle, slots, num_tokens, capacity, config));
  }
  // Low latency has no cached dispatch: places follow from the routing alone, and the handle has that.
  return std::get<0>(torch_ops::ll_dispatch().call(seq, x, {}, expert_ids(), {}, capacity, config));
}

std::pair<Tensor, Tensor> SavedRouting::dispatch_weighted(const Tensor& given, const Tensor& given_weights) const {
  const Tensor x = given.contiguous(), weights = given_weights.contiguous(), ids = expert_ids();
  const auto config = dispatch_config().pack();
  if (is_ht()) {
    const auto made = torch_ops::ht_dispatch().call(seq, x, {}, ids, weights, capacity, config);
    return {std::get<0>(made), std::get<2>(made)};
  }
  const auto made = torch_ops::ll_dispatch().call(seq, x, {}, ids, weights, capacity, config);
  return {std::get<0>(made), std::get<2>(made)};
}

Tensor SavedRouting::dispatch_scalars(const Tensor& weights) const {
  // Weights travel with rows: the shortest that there are.
  const Tensor none = at::zeros_symint({num_tokens, kRowBytes / 4}, weights.options());
  return dispatch_weighted(none, weights).second;
}

}  // namespace ep
