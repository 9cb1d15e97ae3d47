// Typed parts of the window. Ranks exchange offsets; pointers exist only inside a transport.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/math.h"

namespace ep {

using Offset = uint64_t;  // bytes from the start of a window

template <class T>
struct Region {
  Offset offset = 0;
  uint64_t count = 0;

  EP_HD Offset at(uint64_t index) const { return offset + index * sizeof(T); }
};

// Takes regions one after the other, so that the same lines give sizes and offsets.
class Carver {
 public:
  explicit Carver(uint64_t used = 0) : used_(used) {}
  template <class T>
  Region<T> take(uint64_t count, uint64_t alignment = 128) {
    used_ = align_up<uint64_t>(used_, alignment);
    Region<T> region{used_, count};
    EP_CHECK(count <= (kMaxWindow - used_) / sizeof(T), "a window of more than ", kMaxWindow, " bytes");
    used_ += count * sizeof(T);
    return region;
  }
  uint64_t used() const { return used_; }

 private:
  static constexpr uint64_t kMaxWindow = 1ull << 48;  // no address space has more; sums of it stay within 64 bits
  uint64_t used_ = 0;
};

}  // namespace ep
