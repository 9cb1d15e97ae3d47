// What a backward pass needs of a forward one: the routing, along which gradients travel.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

#include "runtime/options.h"
#include "torch/ops/arguments.h"

namespace ep {

// The routing of a handle, of either mode. Lengths are symbols where a compiler traces. All calls are collective.
struct SavedRouting {
  at::Tensor seq, handle;
  at::Tensor slots;  // high throughput; undefined in low latency
  c10::SymInt num_tokens, capacity;
  RoutingNumbers numbers;

  static SavedRouting of(const at::Tensor& seq, const at::Tensor& handle, const at::Tensor& slots,
                         c10::SymInt num_tokens, c10::SymInt capacity, const RoutingNumbers& numbers) {
    return {seq, handle, slots, std::move(num_tokens), std::move(capacity), numbers};
  }
  // `more`: tensors that load() returns behind the routing.
  void save(torch::autograd::AutogradContext* ctx, at::ArrayRef<at::Tensor> more) const;
  static std::pair<SavedRouting, std::vector<at::Tensor>> load(torch::autograd::AutogradContext* ctx);

  bool is_ht() const { return slots.defined(); }
  // ---- From the experts' ranks to the home ranks
  // Sums of the rows of each token, whatever their weights: [T, n].
  at::Tensor combine_rows(const at::Tensor& rows) const;
  // A scalar for each choice: [T, K].
  at::Tensor combine_scalars(const at::Tensor& values) const;
  // Both; one operation in high throughput.
  std::pair<at::Tensor, at::Tensor> combine_both(const at::Tensor& rows, const at::Tensor& values) const;
  // ---- The other way, into rows in the places of the forward's. Rows that do not exist are zero.
  at::Tensor dispatch_rows(const at::Tensor& x) const;
  // Rows, and for each row (expert layouts) or choice (rank layouts) the weight.
  std::pair<at::Tensor, at::Tensor> dispatch_weighted(const at::Tensor& x, const at::Tensor& weights) const;
  at::Tensor dispatch_scalars(const at::Tensor& weights) const;

 private:
  at::Tensor expert_ids() const;  // of the own tokens, int32 [T, K]
  CombineConfig combine_config(at::ScalarType type) const;
  DispatchConfig dispatch_config() const;
};

}  // namespace ep
