// Tensors of one call that must not share memory (base/overlap.h), as torch has them. Tensors must outlive the check.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/overlap.h"

namespace ep {

// const_data_ptr(), in a third of its instructions. Null of an empty one.
inline const void* address_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!impl.has_storage() || impl.numel() == 0) return tensor.const_data_ptr();
  const auto* storage = static_cast<const char*>(impl.unsafe_storage().unsafeGetStorageImpl()->data());
  return storage + impl.storage_offset() * static_cast<int64_t>(impl.itemsize());
}

class AliasCheck {
 public:
  void reads(const char* name, const at::Tensor& tensor) { check_.reads(name, extent_of(tensor)); }
  void reads(const char* name, const at::Tensor* tensor) {
    if (tensor != nullptr) reads(name, *tensor);
  }
  // After all that is read. Refuses a tensor that overlaps one of those before it.
  void writes(const char* name, const at::Tensor& tensor) { check_.writes(name, extent_of(tensor)); }

 private:
  static Extent extent_of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0) return {};
    int64_t last = tensor.numel() - 1;
    if (!tensor.is_contiguous()) {
      last = 0;
      for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
    }
    return {address_of(tensor), static_cast<uint64_t>((last + 1) * tensor.element_size()), tensor.sizes().data(),
            static_cast<int>(tensor.dim())};
  }

  OverlapCheck check_;
};

}  // namespace ep
