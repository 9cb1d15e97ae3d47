// Tensor descriptors of callers, checked.
#pragma once

#include <array>
#include <string>

#include "base/overlap.h"
#include "layout/common/dtype.h"
#include "nccl_epx.h"

namespace ep::c {

using DataType = int;  // the numbers of ncclDataType_t
constexpr DataType kNoType = -1;

// Sizes of a tensor; ndim 0: there is none.
struct Sizes {
  int ndim = 0;
  std::array<int64_t, NCCL_EPX_MAX_DIMS> at{};

  Sizes() = default;
  Sizes(std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes) at[ndim++] = size;
  }
  bool operator==(const Sizes&) const = default;
  int64_t last() const { return at[ndim - 1]; }
  int64_t count() const;
  Sizes with(int64_t last) const;  // one more dimension
};
std::string text_of(const Sizes& sizes);

struct Tensor {
  void* data = nullptr;
  DataType dtype = kNoType;
  Sizes sizes;
  std::array<int64_t, NCCL_EPX_MAX_DIMS> strides{};  // in elements: contiguous ones, if the caller gives no others

  explicit operator bool() const { return sizes.ndim > 0; }
};

int element_bytes(DataType dtype);
const char* name_of(DataType dtype);
std::string name_or_number(DataType dtype);  // of any value
DType to_dtype(DataType dtype);

// While it lives, tensors of this thread may lie in windows of the communicator.
class WindowScope {
 public:
  explicit WindowScope(ncclComm* comm);
  ~WindowScope();
  WindowScope(const WindowScope&) = delete;
  WindowScope& operator=(const WindowScope&) = delete;

 private:
  ncclComm* previous_;
};

// The tensor of a descriptor, or none: of a null pointer or ndim 0. Data is not looked at.
Tensor take_tensor(const ncclEpTensor_t* given, const char* name);

bool is_contiguous(const Tensor& tensor);
Extent extent_of(const Tensor& tensor);  // of any strides; must not outlive the tensor
void check_contiguous(const Tensor& tensor, const char* name);
void check_data(const Tensor& tensor, const char* name);  // is there, aligned to its elements
// All of it. `name` as in the caller's struct. `is_least`: the first size may be larger.
void check_tensor(const Tensor& tensor, const char* name, DataType dtype, const Sizes& sizes, bool is_least = false);
void check_aligned(const Tensor& tensor, const char* name);  // to 16 bytes
void check_id_type(const Tensor& topk_idx, const char* name = "topk_idx");

}  // namespace ep::c
