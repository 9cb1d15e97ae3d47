// Tensors of one call that must not share memory: what it writes, with all that it reads and writes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "base/check.h"

namespace ep {

class Apart {
 public:
  void reads(const char* name, const at::Tensor& tensor) { note(name, tensor, "read"); }
  void reads(const char* name, const at::Tensor* tensor) {
    if (tensor != nullptr) reads(name, *tensor);
  }

  // After all that is read. Refuses a tensor that overlaps one of those before it.
  void writes(const char* name, const at::Tensor& tensor) {
    if (!note(name, tensor, "written")) return;
    const Extent& mine = extents_.back();
    for (const Extent& other : extents_) {
      EP_CHECK(&other == &mine || mine.end <= other.begin || other.end <= mine.begin, name, " of shape ",
               tensor.sizes(), " overlaps ", other.name, " of shape ", other.tensor->sizes(), ", which is ", other.use,
               " while it is written");
    }
  }

 private:
  struct Extent {
    const char *begin, *end, *name, *use;
    const at::Tensor* tensor;
  };

  bool note(const char* name, const at::Tensor& tensor, const char* use) {
    if (!tensor.defined() || tensor.numel() == 0) return false;
    int64_t last = tensor.numel() - 1;
    if (!tensor.is_contiguous()) {
      last = 0;
      for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
    }
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    extents_.push_back({begin, begin + (last + 1) * tensor.element_size(), name, use, &tensor});
    return true;
  }

  c10::SmallVector<Extent, 20> extents_;
};

}  // namespace ep
