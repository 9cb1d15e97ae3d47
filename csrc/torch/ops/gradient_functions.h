// The backward passes of dispatch and combine, of both modes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/check.h"
#include "torch/ops/gradient_wanted.h"
#include "torch/ops/op_types.h"
#include "torch/ops/row_products.h"
#include "torch/ops/run.h"
#include "torch/ops/saved_routing.h"

namespace ep::gradients {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch_ops::Optional;

inline const Optional kNone;

// Refuses what has no derivative: it would be lost.
template <class... Inputs>
bool wants_gradient(const Inputs&... inputs) {
  EP_CHECK_USAGE(!(has_tangent(inputs) || ...),
                 "dispatch and combine have no forward derivative (torch.func.jvp, torch.autograd.forward_ad)");
  const bool wanted = at::GradMode::is_enabled() && (wants(inputs) || ...);
  EP_CHECK_USAGE(!wanted || !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode),
                 "dispatch and combine have no derivative under torch.func: call backward() or torch.autograd.grad()");
  return wanted;
}

// A tensor that is written again keeps nothing of what it was. As torch's own operations, it refuses a leaf.
inline void forget(at::TensorList written) {
  for (const Tensor& each : written) {
    TORCH_CHECK(!at::GradMode::is_enabled() || !each.requires_grad() || each.grad_fn() != nullptr,
                "a leaf Variable that requires grad is being used in an in-place operation.");
    if (each.grad_fn() != nullptr && !each.is_view()) each.detach_();
  }
}

inline bool is_differentiable(const Tensor& rows) { return rows.is_floating_point() && rows.element_size() > 1; }

// ---- dispatch

// What a dispatch has made, as far as it has a gradient: rows of each tensor that was moved, weights of the rows (may
// be undefined).
struct Sent {
  variable_list rows;
  Tensor weights;
  SavedRouting routing;
};

// `xs`: the tensors moved; `written`: the caller's, for the results. Returns their rows, then the weights.
struct Dispatch : torch::autograd::Function<Dispatch> {
  static variable_list forward(AutogradContext* ctx, at::TensorList xs, const Optional& topk_weights,
                               at::TensorList written, const std::function<Sent()>& run) {
    Sent sent = [&] {
      const at::AutoDispatchBelowAutograd below;
      return run();
    }();
    sent.routing.save(ctx, {});
    ctx->saved_data["num_xs"] = static_cast<int64_t>(xs.size());
    ctx->saved_data["num_written"] = static_cast<int64_t>(written.size());
    ctx->saved_data["has_weights"] = topk_weights.has_value();
    if (!written.empty()) ctx->mark_dirty(written.vec());
    variable_list results = std::move(sent.rows), without;
    for (const Tensor& each : results) {
      if (!is_differentiable(each)) without.push_back(each);
    }
    if (sent.weights.defined()) {
      if (!topk_weights.has_value()) without.push_back(sent.weights);  // ones, of which nobody is the source
      results.push_back(std::move(sent.weights));
    }
    ctx->mark_non_differentiable(without);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const InBackwardPass in_backward_pass;
    return guarded([&] { return take_home(ctx, given); });
  }

 private:
  static variable_list take_home(AutogradContext* ctx, const variable_list& given) {
    const SavedRouting routing = SavedRouting::load(ctx).first;
    const auto num_xs = static_cast<size_t>(ctx->saved_data["num_xs"].toInt());
    const bool has_weights = ctx->saved_data["has_weights"].toBool();
    const bool wants_weights = has_weights && ctx->needs_input_grad(num_xs) && given.size() > num_xs;
    variable_list gradients(num_xs);
    Tensor of_weights;
    for (size_t i = 0; i < num_xs; i++) {
      // Quantised rows have none: theirs comes by the carrier.
      if (!ctx->needs_input_grad(i) || !is_differentiable(given[i])) continue;
      if (i == 0 && wants_weights) {
        std::tie(gradients[0], of_weights) = routing.combine_both(given[0], given[num_xs]);
      } else {
        gradients[i] = routing.combine_rows(given[i]);
      }
    }
    if (wants_weights && !of_weights.defined()) of_weights = routing.combine_scalars(given[num_xs]);
    gradients.push_back(of_weights);
    gradients.resize(num_xs + 2 + static_cast<size_t>(ctx->saved_data["num_written"].toInt()));
    return gradients;
  }
};

// ---- combine

struct Combined {
  Tensor out, values;  // either may be undefined
};

// What a backward pass needs beside the tensors that autograd sees.
struct CombineGiven {
  Optional rows;      // that the gradient of weights is made of
  Optional topk_idx;  // with weights of the home rank
  CombineOptions options;
  SavedRouting routing;
};

struct Combine : torch::autograd::Function<Combine> {
  // Returns the sums, the scalars, or both. `rows` may be a carrier (carrier() below) of the rows.
  static variable_list forward(AutogradContext* ctx, const Optional& rows, const Optional& values,
                               const Optional& weights, at::TensorList biases, at::TensorList written,
                               const CombineGiven& given, const std::function<Combined()>& run) {
    const Combined made = [&] {
      const at::AutoDispatchBelowAutograd below;
      return run();
    }();
    const auto or_undefined = [](const Optional& each) { return each ? *each : Tensor(); };
    const bool saves_rows = wants(weights);
    given.routing.save(
        ctx, {saves_rows ? or_undefined(given.rows) : Tensor(), or_undefined(weights), or_undefined(given.topk_idx)});
    auto& kept = ctx->saved_data;
    const auto options = given.options.pack();
    kept["options"] = std::vector<int64_t>(options.begin(), options.end());
    kept["has_rows"] = rows.has_value();
    kept["has_values"] = values.has_value();
    kept["has_weights"] = weights.has_value();
    kept["num_biases"] = static_cast<int64_t>(biases.size());
    kept["num_written"] = static_cast<int64_t>(written.size());
    if (rows) kept["rows_type"] = static_cast<int64_t>(rows->scalar_type());
    if (!written.empty()) ctx->mark_dirty(written.vec());
    variable_list results;
    if (rows) results.push_back(made.out);
    if (values) results.push_back(made.values);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& given) {
    const InBackwardPass in_backward_pass;
    return guarded([&] { return take_out(ctx, given); });
  }

 private:
  static variable_list take_out(AutogradContext* ctx, const variable_list& given) {
    const auto [routing, saved] = SavedRouting::load(ctx);
    auto& kept = ctx->saved_data;
    const bool has_rows = kept["has_rows"].toBool(), has_values = kept["has_values"].toBool();
    const bool has_weights = kept["has_weights"].toBool();
    const Tensor of_out = has_rows ? given[0] : Tensor(), of_values = has_values ? given.back() : Tensor();
    // Edges of the graph are the tensors that were there, in their order.
    size_t edge = 0;
    const bool wants_rows = has_rows && ctx->needs_input_grad(edge++);
    const bool wants_values = has_values && ctx->needs_input_grad(edge++);
    const bool wants_weights = has_weights && ctx->needs_input_grad(edge++);
    Tensor rows, values, weights;
    if (wants_rows || wants_weights) {
      const auto type = static_cast<at::ScalarType>(kept["rows_type"].toInt());
      const auto options = CombineOptions::unpack(kept["options"].toIntVector().data());
      Tensor factors = options.weighting == Weighting::kDispatch ? saved[1] : Tensor(), sent;
      if (options.weighting == Weighting::kHome) {
        std::tie(sent, factors) = routing.dispatch_weighted(of_out, unskipped(saved[1], saved[2], routing));
      } else if (wants_values) {
        std::tie(sent, values) = routing.dispatch_weighted(of_out, of_values);
      } else {
        sent = routing.dispatch_rows(of_out);
      }
      if (options.scale != 1.0f) sent = sent.to(at::kFloat).mul(options.scale);
      if (wants_rows) rows = factors.defined() ? weighted(sent, factors, type) : sent.to(type);
      if (wants_weights) {
        weights = dots(saved[0], sent, factors);
        if (options.weighting == Weighting::kHome) {
          weights = unskipped(routing.combine_scalars(weights), saved[2], routing);
        }
      }
    }
    if (wants_values && !values.defined()) values = routing.dispatch_scalars(of_values);
    variable_list gradients{rows, values, weights};
    for (int64_t i = 0; i < kept["num_biases"].toInt(); i++) gradients.push_back(of_out);
    gradients.resize(gradients.size() + 2 + static_cast<size_t>(kept["num_written"].toInt()));
    return gradients;
  }

  // 0 where the ids given at combine skip a row.
  static Tensor unskipped(const Tensor& values, const Tensor& ids, const SavedRouting& routing) {
    if (!ids.defined()) return values;
    return at::where(ids.ge(0).logical_and(ids.lt(routing.numbers.num_experts)), values,
                     at::zeros({}, values.options()));
  }
};

}  // namespace ep::gradients
