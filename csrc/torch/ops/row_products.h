// Rows and their weights, multiplied, in float32. Each has the other for its derivative, so that all orders are right:
// also where a weight is 0, and where a row that nobody reads is no number.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace ep::gradients {

// rows [.., n] * weights [..]. A weight of 0 gives 0 also where a row is no number: such a row was skipped.
inline at::Tensor weighted(const at::Tensor& rows, const at::Tensor& weights, at::ScalarType type);

// The sums of rows * others over their elements. 0 for a row that does not exist, whatever its content: its weight is
// 0, and so is all of `others`, which came with a dispatch.
inline at::Tensor dots(const at::Tensor& rows, const at::Tensor& others, const at::Tensor& weights);

struct Weighted : torch::autograd::Function<Weighted> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weights,
                            at::ScalarType type) {
    ctx->save_for_backward({rows, weights});
    const at::Tensor factor = weights.unsqueeze(-1), product = rows.to(at::kFloat).mul(factor);
    return at::where(factor.eq(0), at::zeros({}, product.options()), product).to(type);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& given) {
    const auto saved = ctx->get_saved_variables();
    at::Tensor of_rows, of_weights;
    if (ctx->needs_input_grad(0)) of_rows = weighted(given[0], saved[1], saved[0].scalar_type());
    if (ctx->needs_input_grad(1)) of_weights = dots(given[0], saved[0], saved[1]);
    return {of_rows, of_weights, {}};
  }
};

// The mask is of the value alone. A row that exists may have a weight of 0 and `others` of 0, too, and its derivatives
// are those of a product; nobody reads those of a row that does not exist.
struct Dots : torch::autograd::Function<Dots> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& others,
                            const std::optional<at::Tensor>& weights) {
    ctx->save_for_backward({rows, others});
    at::Tensor sums = rows.to(at::kFloat).mul(others.to(at::kFloat)).sum(-1);
    if (!weights) return sums;
    const at::Tensor is_missing = weights->eq(0).logical_and(others.eq(0).all(-1));
    return at::where(is_missing, at::zeros({}, sums.options()), sums);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& given) {
    const auto saved = ctx->get_saved_variables();
    at::Tensor of_rows, of_others;
    if (ctx->needs_input_grad(0)) of_rows = weighted(saved[1], given[0], saved[0].scalar_type());
    if (ctx->needs_input_grad(1)) of_others = weighted(saved[0], given[0], saved[1].scalar_type());
    return {of_rows, of_others, {}};
  }
};

inline at::Tensor weighted(const at::Tensor& rows, const at::Tensor& weights, at::ScalarType type) {
  return Weighted::apply(rows, weights, type);
}

inline at::Tensor dots(const at::Tensor& rows, const at::Tensor& others, const at::Tensor& weights) {
  return Dots::apply(rows, others, weights.defined() ? std::optional(weights) : std::nullopt);
}

}  // namespace ep::gradients
