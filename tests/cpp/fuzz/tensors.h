// Tensors of the fuzz of the C library, each in an allocation of its own, so that AddressSanitizer sees its ends.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "fuzz/random.h"
#include "nccl_epx.h"

namespace ep::fuzz {

constexpr int64_t kMostBytes = 1 << 20;
__extension__ typedef __int128 Wide;  // so that no sum of sizes and strides overflows

inline int element_bytes(int dtype) {
  constexpr int kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 1};
  return dtype >= 0 && dtype < 13 ? kBytes[dtype] : 8;
}

// A descriptor with its sizes, and strides, which only scales have, beside it.
struct Described {
  ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
  size_t sizes[4] = {0, 0, 0, 0};
  int64_t strides[2] = {0, 0};

  Described() { tensor.sizes = sizes; }
  Described(const Described& other) : tensor(other.tensor) {
    std::copy(std::begin(other.sizes), std::end(other.sizes), sizes);
    tensor.sizes = sizes;
  }
  Described& operator=(const Described& other) {
    if (this == &other) return *this;
    tensor = other.tensor;
    std::copy(std::begin(other.sizes), std::end(other.sizes), sizes);
    tensor.sizes = sizes;
    return *this;
  }
  ~Described() = default;
  // Any number, which C++ must not see as one of the enumeration.
  void set_type(int dtype) { std::memcpy(&tensor.datatype, &dtype, sizeof dtype); }
  int type() const {
    int dtype;
    std::memcpy(&dtype, &tensor.datatype, sizeof dtype);
    return dtype;
  }
};
inline ncclEpTensor_t* of(Described* described) { return described == nullptr ? nullptr : &described->tensor; }

class Tensors {
 public:
  explicit Tensors(Random& random) : random_(random) {}

  // A tensor of these sizes, seldom with something odd. Its memory holds what it says, or its sizes and strides are
  // such that no memory could.
  Described* make(int dtype, std::initializer_list<int64_t> sizes, bool is_strided = false) {
    Described& made = made_.emplace_back();
    made.tensor.ndim = static_cast<unsigned>(sizes.size());
    made.set_type(dtype);
    std::copy(sizes.begin(), sizes.end(), made.sizes);
    if (is_strided) stride(made);
    if (random_.one_in(25)) spoil(made, is_strided);
    give_memory(made);
    return random_.one_in(200) ? nullptr : &made;
  }
  // Whether nothing about it is odd.
  static bool is_as(const Described* made, int dtype, std::initializer_list<int64_t> sizes) {
    return made != nullptr && made->tensor.data != nullptr && reinterpret_cast<uintptr_t>(made->tensor.data) % 8 == 0 &&
           made->tensor.ndim == sizes.size() && made->type() == dtype &&
           std::equal(sizes.begin(), sizes.end(), made->sizes,
                      [](int64_t a, size_t b) { return static_cast<size_t>(a) == b; });
  }
  // The same for a description that the library has filled in.
  // Null if that is too much.
  Described* fill(const Described& described) {
    Wide bytes = element_bytes(described.type());
    for (unsigned i = 0; i < described.tensor.ndim; i++) bytes *= described.sizes[i];
    if (bytes > kMostBytes) return nullptr;
    Described& made = made_.emplace_back(described);
    if (random_.one_in(40)) spoil(made, false);
    give_memory(made);
    if (random_.one_in(60)) share_memory(made.tensor);
    return &made;
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
  void stride(Described& made) {
    const auto rows = static_cast<int64_t>(made.sizes[0]), columns = static_cast<int64_t>(made.sizes[1]);
    const int64_t kinds[][2] = {{columns, 1}, {1, rows}, {columns + 3, 1}, {0, 1}};
    const auto& strides = kinds[random_.within(0, 3)];
    for (int i = 0; i < 2; i++) made.strides[i] = random_.one_in(20) ? far() : strides[i];
  }
  int64_t far() {
    constexpr int64_t kFar[] = {INT64_MAX, INT64_MIN, INT64_MAX / 2, INT64_MIN + 1, 1ll << 62};
    return random_.pick(kFar);
  }
  void spoil(Described& made, bool is_strided) {
    ncclEpTensor_t& tensor = made.tensor;
    switch (random_.within(0, 5)) {
      case 0:
        tensor.ndim = static_cast<unsigned>(random_.mostly(random_.within(0, 5), 4));
        break;
      case 1:
        made.set_type(static_cast<int>(random_.mostly(random_.within(-1, 13), 4)));
        break;
      case 2:
        made.sizes[random_.within(0, 3)] = static_cast<size_t>(random_.odd());
        break;
      case 3:
        if (is_strided) made.strides[random_.within(0, 1)] = far();
        break;
      case 4:
        tensor.sizes = nullptr;
        break;
      default:
        (random_.one_in(2) ? tensor.magic : tensor.size) = static_cast<unsigned>(random_.odd());
    }
  }
  void give_memory(Described& made) {
    ncclEpTensor_t& tensor = made.tensor;
    Wide first = 0, last = 0;
    const int ndim = tensor.ndim > 4 ? 4 : static_cast<int>(tensor.ndim);
    const bool has_strides = made.strides[0] != 0 || made.strides[1] != 0;
    Wide contiguous = 1;
    for (int i = ndim - 1; i >= 0; i--) {
      const Wide size = made.sizes[i] < 1 ? 1 : made.sizes[i];
      const Wide step = has_strides && i < 2 ? static_cast<Wide>(made.strides[i]) : contiguous;
      if (contiguous < kMostBytes) contiguous *= size;
      (step < 0 ? first : last) += (size - 1) * step;
      if (first < -kMostBytes || last > kMostBytes) break;
    }
    const int bytes = element_bytes(made.type());
    const bool is_far = first < -kMostBytes || last > kMostBytes;
    const Wide span = is_far ? 0 : (last - first + 1) * bytes;
    if (is_far || span > kMostBytes) {  // the library must not follow it further than it needs
      tensor.data = allocate(kMostBytes);
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
    if (blocks_.empty()) return;
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
  std::deque<Described> made_;
  std::vector<Block> blocks_;
  std::deque<std::unique_ptr<void, decltype(&std::free)>> memory_;
};

}  // namespace ep::fuzz
