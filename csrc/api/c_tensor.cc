#include "api/c_tensor.h"

#include <algorithm>

#include "api/c_error.h"
#include "api/c_struct.h"
#include "base/check.h"

namespace ep::c {
namespace {

struct TypeInfo {
  const char* name;
  int bytes;
};

constexpr TypeInfo kTypes[] = {{"int8", 1},    {"uint8", 1},    {"int32", 4},       {"uint32", 4},
                               {"int64", 8},   {"uint64", 8},   {"float16", 2},     {"float32", 4},
                               {"float64", 8}, {"bfloat16", 2}, {"float8_e4m3", 1}, {"float8_e5m2", 1}};
constexpr int kNumTypes = sizeof kTypes / sizeof kTypes[0];

bool is_known(ncclEpDataType_t dtype) { return dtype >= 0 && dtype < kNumTypes; }

constexpr int64_t kMaxElements = INT64_MAX / 64;  // so that bytes fit into 64 bits

}  // namespace

int64_t Sizes::count() const {
  int64_t count = 1;
  for (int i = 0; i < ndim; i++) count *= at[i];
  return count;
}

Sizes Sizes::with(int64_t last) const {
  Sizes sizes = *this;
  sizes.at[sizes.ndim++] = last;
  return sizes;
}

std::string text_of(const Sizes& sizes) { return text_of_sizes(sizes.at.data(), sizes.ndim); }

int element_bytes(ncclEpDataType_t dtype) { return kTypes[dtype].bytes; }
const char* name_of(ncclEpDataType_t dtype) { return kTypes[dtype].name; }
std::string name_or_number(ncclEpDataType_t dtype) { return is_known(dtype) ? name_of(dtype) : std::to_string(dtype); }

DType to_dtype(ncclEpDataType_t dtype) {
  switch (dtype) {
    case NCCL_EP_BFLOAT16:
      return DType::kBF16;
    case NCCL_EP_FLOAT16:
      return DType::kF16;
    case NCCL_EP_FLOAT32:
      return DType::kF32;
    case NCCL_EP_FLOAT8_E4M3:
      return DType::kF8E4M3;
    default:
      break;
  }
  switch (element_bytes(dtype)) {
    case 1:
      return DType::kOpaque8;
    case 4:
      return DType::kOpaque32;
    default:
      return DType::kOpaque64;
  }
}

Tensor take_tensor(const ncclEpTensor_t* given, const char* name) {
  Tensor tensor;
  if (given == nullptr) return tensor;
  const ncclEpTensor_t full = take(given, name);
  EP_CHECK(full.ndim >= 0 && full.ndim <= NCCL_EP_MAX_DIMS, name, " has ", full.ndim, " dimensions, at most ",
           NCCL_EP_MAX_DIMS);
  if (full.ndim == 0) return tensor;
  EP_CHECK(is_known(full.dtype), name, " has dtype ", full.dtype, ", which is unknown");
  tensor.data = full.data;
  tensor.dtype = full.dtype;
  tensor.sizes.ndim = full.ndim;
  std::copy_n(full.sizes, full.ndim, tensor.sizes.at.begin());
  const bool has_strides = std::any_of(full.strides, full.strides + full.ndim, [](int64_t s) { return s != 0; });
  int64_t elements = 1;
  for (int i = full.ndim - 1; i >= 0; i--) {
    const int64_t size = full.sizes[i];
    tensor.strides[i] = has_strides ? full.strides[i] : elements;
    EP_CHECK(size >= 0 && (size == 0 || elements <= kMaxElements / size), name, " has shape ", text_of(tensor.sizes),
             ": not the sizes of a tensor in memory");
    elements *= std::max<int64_t>(size, 1);
  }
  return tensor;
}

bool is_contiguous(const Tensor& tensor) {
  int64_t stride = 1;
  for (int i = tensor.sizes.ndim - 1; i >= 0; i--) {
    if (tensor.sizes.at[i] != 1 && tensor.strides[i] != stride) return false;
    stride *= tensor.sizes.at[i];
  }
  return true;
}

Extent extent_of(const Tensor& tensor) {
  if (!tensor || tensor.sizes.count() == 0) return {};
  // Without a sign, in which strides that no memory has wrap around.
  const auto size = static_cast<uint64_t>(element_bytes(tensor.dtype));
  uint64_t before = 0, behind = 0;  // the first element, in bytes
  for (int i = 0; i < tensor.sizes.ndim; i++) {
    const auto steps = static_cast<uint64_t>(tensor.sizes.at[i] - 1);
    const int64_t stride = tensor.strides[i];
    if (stride < 0) {
      before += steps * (0 - static_cast<uint64_t>(stride)) * size;
    } else {
      behind += steps * static_cast<uint64_t>(stride) * size;
    }
  }
  return {static_cast<const char*>(tensor.data) - before, before + behind + size, tensor.sizes.at.data(),
          tensor.sizes.ndim};
}

void check_contiguous(const Tensor& tensor, const char* name) {
  if (tensor.sizes.count() == 0) return;
  int64_t stride = 1;
  for (int i = tensor.sizes.ndim - 1; i >= 0; i--) {
    EP_CHECK(tensor.sizes.at[i] == 1 || tensor.strides[i] == stride, name, " of shape ", text_of(tensor.sizes),
             " is not contiguous: stride ", i, " is ", tensor.strides[i], ", must be ", stride);
    stride *= tensor.sizes.at[i];
  }
}

void check_data(const Tensor& tensor, const char* name) {
  if (tensor.sizes.count() == 0) return;
  EP_CHECK(tensor.data != nullptr, name, " of shape ", text_of(tensor.sizes), " has no data");
  EP_CHECK(reinterpret_cast<uintptr_t>(tensor.data) % element_bytes(tensor.dtype) == 0, name, " at address ",
           tensor.data, " is not aligned to its elements of ", element_bytes(tensor.dtype), " bytes");
}

void check_tensor(const Tensor& tensor, const char* name, ncclEpDataType_t dtype, const Sizes& sizes) {
  EP_CHECK(tensor, name, " is not given, must be ", name_of(dtype), " ", text_of(sizes));
  EP_CHECK(tensor.dtype == dtype, name, " is ", name_of(tensor.dtype), ", must be ", name_of(dtype));
  EP_CHECK(tensor.sizes == sizes, name, " has shape ", text_of(tensor.sizes), ", must be ", text_of(sizes));
  check_contiguous(tensor, name);
  check_data(tensor, name);
}

void check_aligned(const Tensor& tensor, const char* name) {
  EP_CHECK(tensor.sizes.count() == 0 || reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0, name, " at address ",
           tensor.data, " is not aligned to 16 bytes");
}

void check_id_type(const Tensor& topk_idx) {
  EP_CHECK(topk_idx.dtype == NCCL_EP_INT64 || topk_idx.dtype == NCCL_EP_INT32, "topk_idx is ", name_of(topk_idx.dtype),
           ", must be int64 or int32");
}

}  // namespace ep::c

extern "C" ncclEpResult_t ncclEpTensorBytes(const ncclEpTensor_t* tensor, size_t* bytes) {
  return ep::c::guarded("ncclEpTensorBytes", [&] {
    EP_CHECK(bytes != nullptr, "bytes is null");
    const ep::c::Tensor taken = ep::c::take_tensor(tensor, "tensor");
    *bytes = taken ? static_cast<size_t>(taken.sizes.count()) * ep::c::element_bytes(taken.dtype) : 0;
  });
}
