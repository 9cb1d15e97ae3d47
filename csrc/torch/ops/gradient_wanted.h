// Which tensors a derivative is wanted of, for the ops and for the calls that go past torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <type_traits>

namespace ep::gradients {

// Most tensors have nothing of autograd.
inline bool has_autograd(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr;
}
inline bool wants(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
inline bool wants(const std::optional<at::Tensor>& tensor) { return tensor && wants(*tensor); }
inline bool wants(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& each) { return wants(each); });
}
inline bool has_tangent(const at::Tensor& tensor) { return has_autograd(tensor) && tensor._fw_grad(0).defined(); }
inline bool has_tangent(const std::optional<at::Tensor>& tensor) { return tensor && has_tangent(*tensor); }
inline bool has_tangent(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& each) { return has_tangent(each); });
}
// Of either direction: an op without a forward derivative says so above autograd. Of any argument: numbers never do.
template <class Input>
bool wants_any(const Input& input) {
  if constexpr (std::is_same_v<Input, at::Tensor>) {
    if (!has_autograd(input)) return false;
  }
  if constexpr (requires { wants(input); }) {
    return (wants(input) && at::GradMode::is_enabled()) || has_tangent(input);
  }
  return false;
}

}  // namespace ep::gradients
