// Tensors of the fuzz of the C library, each in an allocation of its own, so that AddressSanitizer sees its ends.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "fuzz/random.h"
#include "nccl_ep.h"

namespace ep::fuzz {

constexpr int64_t kMostBytes = 1 << 20;
__extension__ typedef __int128 Wide;  // so that no sum of sizes and strides overflows

inline int element_bytes(int dtype) {
  constexpr int kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return dtype >= 0 && dtype < 12 ? kBytes[dtype] : 8;
}

class Tensors {
 public:
  explicit Tensors(Random& random) : random_(random) {}

  // A tensor of these sizes, seldom with something odd. Its memory holds what it says, or its sizes and strides are
  // such that no memory could.
  ncclEpTensor_t* make(int dtype, std::initializer_list<int64_t> sizes, bool is_strided = false) {
    ncclEpTensor_t& tensor = made_.emplace_back(ncclEpTensor_t NCCL_EP_TENSOR_INIT);
    tensor.ndim = static_cast<int32_t>(sizes.size());
    tensor.dtype = dtype;
    std::copy(sizes.begin(), sizes.end(), tensor.sizes);
    if (is_strided) stride(tensor);
    if (random_.one_in(25)) spoil(tensor);
    give_memory(tensor);
    return random_.one_in(200) ? nullptr : &tensor;
  }
  // Whether nothing about it is odd.
  static bool is_as(const ncclEpTensor_t* tensor, int dtype, std::initializer_list<int64_t> sizes) {
    return tensor != nullptr && tensor->data != nullptr && reinterpret_cast<uintptr_t>(tensor->data) % 8 == 0 &&
           tensor->ndim == static_cast<int32_t>(sizes.size()) && tensor->dtype == dtype &&
           std::equal(sizes.begin(), sizes.end(), tensor->sizes) &&
           std::all_of(tensor->strides, tensor->strides + 4, [](int64_t stride) { return stride == 0; });
  }
  // The same for a description that the library has filled in.
  // Null if that is too much.
  ncclEpTensor_t* fill(const ncclEpTensor_t& described) {
    Wide bytes = element_bytes(described.dtype);
    for (int i = 0; i < described.ndim; i++) bytes *= described.sizes[i];
    if (bytes > kMostBytes) return nullptr;
    ncclEpTensor_t& tensor = made_.emplace_back(described);
    if (random_.one_in(40)) spoil(tensor);
    give_memory(tensor);
    if (random_.one_in(60)) share_memory(tensor);
    return &tensor;
  }
  // Any words in some places: what a handle holds becomes addresses.
  void change(void* memory, size_t bytes) {
    auto* words = static_cast<int32_t*>(memory);
    for (size_t i = 0; i < bytes / 4; i++) {
      if (random_.one_in(8)) words[i] = static_cast<int32_t>(random_.odd());
    }
  }
  void* allocate(size_t bytes) {
    memory_.emplace_back(std::aligned_alloc(64, (bytes + 127) / 64 * 64), &std::free);
    return memory_.back().get();
  }

 private:
  // Rows that are not one after the other.
  void stride(ncclEpTensor_t& tensor) {
    const int64_t kinds[][2] = {{tensor.sizes[1], 1}, {1, tensor.sizes[0]}, {tensor.sizes[1] + 3, 1}, {0, 1}};
    const auto& strides = kinds[random_.within(0, 3)];
    for (int i = 0; i < 2; i++) tensor.strides[i] = random_.one_in(20) ? far() : strides[i];
  }
  int64_t far() {
    constexpr int64_t kFar[] = {INT64_MAX, INT64_MIN, INT64_MAX / 2, INT64_MIN + 1, 1ll << 62};
    return random_.pick(kFar);
  }
  void spoil(ncclEpTensor_t& tensor) {
    switch (random_.within(0, 4)) {
      case 0:
        tensor.ndim = static_cast<int32_t>(random_.mostly(random_.within(0, 5), 4));
        break;
      case 1:
        tensor.dtype = static_cast<int32_t>(random_.mostly(random_.within(-1, 12), 4));
        break;
      case 2:
        tensor.sizes[random_.within(0, 3)] = random_.odd();
        break;
      case 3:
        tensor.strides[random_.within(0, 3)] = far();
        break;
      default:
        (random_.one_in(2) ? tensor.magic : tensor.version) = static_cast<uint32_t>(random_.odd());
    }
  }
  void give_memory(ncclEpTensor_t& tensor) {
    Wide first = 0, last = 0;
    const int ndim = tensor.ndim < 0 || tensor.ndim > 4 ? 4 : tensor.ndim;
    bool has_strides = false;
    for (int i = 0; i < ndim; i++) has_strides = has_strides || tensor.strides[i] != 0;
    Wide contiguous = 1;
    for (int i = ndim - 1; i >= 0; i--) {
      const Wide size = tensor.sizes[i] < 1 ? 1 : tensor.sizes[i];
      const Wide step = has_strides ? static_cast<Wide>(tensor.strides[i]) : contiguous;
      if (contiguous < kMostBytes) contiguous *= size;
      (step < 0 ? first : last) += (size - 1) * step;
      if (first < -kMostBytes || last > kMostBytes) break;
    }
    const int bytes = element_bytes(tensor.dtype);
    const Wide span = (last - first + 1) * bytes;
    if (first < -kMostBytes || span > kMostBytes) {  // the library must not follow it
      tensor.data = allocate(64);
      return;
    }
    auto* memory = static_cast<char*>(exact(static_cast<size_t>(span)));
    std::memset(memory, 0, static_cast<size_t>(span));
    tensor.data = memory + static_cast<int64_t>(-first * bytes);
    if (random_.one_in(100)) tensor.data = nullptr;
    if (random_.one_in(100) && bytes > 1) tensor.data = memory + 1;  // which is refused
  }
  // The memory of another one that is as large.
  void share_memory(ncclEpTensor_t& tensor) {
    const auto own =
        std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& b) { return b.data == tensor.data; });
    const Block& other = blocks_[random_.within(0, static_cast<int64_t>(blocks_.size()) - 1)];
    if (own != blocks_.end() && other.bytes >= own->bytes) tensor.data = other.data;
  }
  // malloc aligns to 16 bytes, and the sanitizer guards the last byte.
  void* exact(size_t bytes) {
    memory_.emplace_back(std::malloc(bytes), &std::free);
    blocks_.push_back({memory_.back().get(), bytes});
    return memory_.back().get();
  }

  struct Block {
    void* data;
    size_t bytes;
  };
  Random& random_;
  std::deque<ncclEpTensor_t> made_;
  std::vector<Block> blocks_;
  std::deque<std::unique_ptr<void, decltype(&std::free)>> memory_;
};

}  // namespace ep::fuzz
