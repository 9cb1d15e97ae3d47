// Tensors of one call that must not share memory: what it writes, with all that it reads and writes.
#pragma once

#include <array>

#include "base/check.h"

namespace ep {

// Bytes [begin, end) of a tensor, none where both are equal.
struct Extent {
  const char *begin = nullptr, *end = nullptr;
};

// `Traits`: Tensor, extent_of(tensor), and shape_of(tensor), which an error's text can hold.
template <class Traits>
class ApartOf {
 public:
  using Tensor = typename Traits::Tensor;

  void reads(const char* name, const Tensor& tensor) { note(name, tensor, "read"); }
  void reads(const char* name, const Tensor* tensor) {
    if (tensor != nullptr) reads(name, *tensor);
  }

  // After all that is read. Refuses a tensor that overlaps one of those before it.
  void writes(const char* name, const Tensor& tensor) {
    if (!note(name, tensor, "written")) return;
    const Noted& mine = noted_[count_ - 1];
    for (int i = 0; i < count_ - 1; i++) {
      const Noted& other = noted_[i];
      EP_CHECK(mine.extent.end <= other.extent.begin || other.extent.end <= mine.extent.begin, name, " of shape ",
               Traits::shape_of(tensor), " overlaps ", other.name, " of shape ", Traits::shape_of(*other.tensor),
               ", which is ", other.use, " while it is written");
    }
  }

 private:
  static constexpr int kMost = 32;  // tensors of a call
  struct Noted {
    Extent extent;
    const char *name, *use;
    const Tensor* tensor;
  };

  bool note(const char* name, const Tensor& tensor, const char* use) {
    const Extent extent = Traits::extent_of(tensor);
    if (extent.begin == extent.end) return false;
    EP_CHECK(count_ < kMost, "more than ", kMost, " tensors in a call");
    noted_[count_++] = {extent, name, use, &tensor};
    return true;
  }

  std::array<Noted, kMost> noted_;
  int count_ = 0;
};

}  // namespace ep
