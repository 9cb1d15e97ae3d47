#include "api/c_tensor.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "api/c_error.h"
#include "api/c_struct.h"
#include "api/factory.h"
#include "base/check.h"

namespace ep::c {
namespace {

struct TypeInfo {
  const char* name;
  int bytes;
};

constexpr TypeInfo kTypes[] = {{"int8", 1},        {"uint8", 1},       {"int32", 4},   {"uint32", 4},  {"int64", 8},
                               {"uint64", 8},      {"float16", 2},     {"float32", 4}, {"float64", 8}, {"bfloat16", 2},
                               {"float8_e4m3", 1}, {"float8_e5m2", 1}, {"float4x2", 1}};
constexpr int kNumTypes = sizeof kTypes / sizeof kTypes[0];

bool is_known(DataType dtype) { return dtype >= 0 && dtype < kNumTypes; }

// Of ncclEpTensorAlloc: the descriptor stands first.
struct AllocatedTensor {
  ncclEpTensor_t tensor;
  size_t sizes[NCCL_EPX_MAX_DIMS];
};

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

int element_bytes(DataType dtype) { return kTypes[dtype].bytes; }
const char* name_of(DataType dtype) { return kTypes[dtype].name; }
std::string name_or_number(DataType dtype) { return is_known(dtype) ? name_of(dtype) : std::to_string(dtype); }

DType to_dtype(DataType dtype) {
  switch (dtype) {
    case ncclBfloat16:
      return DType::kBF16;
    case ncclFloat16:
      return DType::kF16;
    case ncclFloat32:
      return DType::kF32;
    case ncclFloat8e4m3:
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

namespace {

thread_local ncclComm* comm_of_windows = nullptr;

void* address_of(const ncclEpTensor_t& given, const char* name) {
  if (given.data != nullptr || given.win_hdl == nullptr) return given.data;
  EP_CHECK(comm_of_windows != nullptr, name, " has a window and no data: windows are of groups of NCCL communicators");
  return window_address(comm_of_windows, given.win_hdl, given.win_offset);
}

}  // namespace

WindowScope::WindowScope(ncclComm* comm) : previous_(std::exchange(comm_of_windows, comm)) {}
WindowScope::~WindowScope() { comm_of_windows = previous_; }

Tensor take_tensor(const ncclEpTensor_t* given, const char* name) {
  Tensor tensor;
  if (given == nullptr) return tensor;
  const ncclEpTensor_t full = take(given, name);
  EP_CHECK(full.ndim <= NCCL_EPX_MAX_DIMS, name, " has ", full.ndim, " dimensions, at most ", NCCL_EPX_MAX_DIMS);
  if (full.ndim == 0) return tensor;
  const auto dtype = static_cast<DataType>(number_of(full.datatype));
  EP_CHECK(is_known(dtype), name, " has datatype ", dtype, ", which is unknown");
  EP_CHECK(full.sizes != nullptr, name, " has ", full.ndim, " dimensions, but no sizes");
  tensor.data = address_of(full, name);
  tensor.dtype = dtype;
  tensor.sizes.ndim = static_cast<int>(full.ndim);
  for (int i = 0; i < tensor.sizes.ndim; i++) tensor.sizes.at[i] = static_cast<int64_t>(full.sizes[i]);
  int64_t elements = 1;
  for (int i = tensor.sizes.ndim - 1; i >= 0; i--) {
    const int64_t size = tensor.sizes.at[i];
    tensor.strides[i] = elements;
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

void check_tensor(const Tensor& tensor, const char* name, DataType dtype, const Sizes& sizes, bool is_least) {
  EP_CHECK(tensor, name, " is not given, must be ", name_of(dtype), " ", text_of(sizes));
  EP_CHECK(tensor.dtype == dtype, name, " is ", name_of(tensor.dtype), ", must be ", name_of(dtype));
  Sizes seen = tensor.sizes;
  if (is_least && seen.ndim > 0 && seen.at[0] > sizes.at[0]) seen.at[0] = sizes.at[0];
  EP_CHECK(seen == sizes, name, " has shape ", text_of(tensor.sizes), ", must be ", text_of(sizes),
           is_least ? " or longer" : "");
  check_contiguous(tensor, name);
  check_data(tensor, name);
}

void check_aligned(const Tensor& tensor, const char* name) {
  EP_CHECK(tensor.sizes.count() == 0 || reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0, name, " at address ",
           tensor.data, " is not aligned to 16 bytes");
}

void check_id_type(const Tensor& topk_idx, const char* name) {
  EP_CHECK(topk_idx.dtype == ncclInt64 || topk_idx.dtype == ncclInt32, name, " is ", name_of(topk_idx.dtype),
           ", must be int64 or int32");
}

}  // namespace ep::c

using namespace ep::c;

extern "C" {

ncclResult_t ncclEpTensorAlloc(ncclEpTensor_t** tensor, unsigned int ndim, ncclDataType_t datatype, const size_t* sizes,
                               const ncclEpTensorAllocConfig_t* config) {
  return guarded("ncclEpTensorAlloc", [&] {
    take_or_default(config, "config");
    EP_CHECK(tensor != nullptr, "tensor is null");
    EP_CHECK(ndim >= 1 && ndim <= NCCL_EPX_MAX_DIMS, "ndim is ", ndim, ", must be 1 to ", NCCL_EPX_MAX_DIMS);
    EP_CHECK(sizes != nullptr, "sizes is null");
    auto made = std::make_unique<AllocatedTensor>();
    std::copy_n(sizes, ndim, made->sizes);
    made->tensor = filled<ncclEpTensor_t>();
    made->tensor.magic = kAllocatedMagic;
    made->tensor.ndim = ndim;
    std::memcpy(&made->tensor.datatype, &datatype, sizeof datatype);
    made->tensor.sizes = made->sizes;
    *tensor = &made.release()->tensor;
  });
}

ncclResult_t ncclEpTensorDestroy(ncclEpTensor_t* tensor) {
  return guarded("ncclEpTensorDestroy", [&] {
    if (tensor == nullptr) return;
    take(tensor, "tensor");
    EP_CHECK(tensor->magic == kAllocatedMagic, "tensor is not of ncclEpTensorAlloc");
    tensor->magic = 0;
    delete reinterpret_cast<AllocatedTensor*>(tensor);
  });
}

ncclResult_t ncclEpxTensorBytes(const ncclEpTensor_t* tensor, size_t* bytes) {
  return guarded("ncclEpxTensorBytes", [&] {
    EP_CHECK(bytes != nullptr, "bytes is null");
    const Tensor taken = take_tensor(tensor, "tensor");
    *bytes = taken ? static_cast<size_t>(taken.sizes.count()) * element_bytes(taken.dtype) : 0;
  });
}

}  // extern "C"
