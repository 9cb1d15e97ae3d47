// base/apart.h for torch's tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/apart.h"

namespace ep {

struct TorchExtents {
  using Tensor = at::Tensor;

  static Extent extent_of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0) return {};
    int64_t last = tensor.numel() - 1;
    if (!tensor.is_contiguous()) {
      last = 0;
      for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
    }
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    return {begin, begin + (last + 1) * tensor.element_size()};
  }
  static at::IntArrayRef shape_of(const at::Tensor& tensor) { return tensor.sizes(); }
};
using Apart = ApartOf<TorchExtents>;

}  // namespace ep
