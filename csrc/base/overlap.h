// Memory of one call that must not overlap: each output, with all that the call reads and writes.
#pragma once

#include <cstdint>
#include <string>

#include "base/check.h"

namespace ep {

std::string text_of_sizes(const int64_t* sizes, int ndim);  // "[4, 16]"

// A tensor's memory, from its first byte to its last. Value-initialised: none.
struct Extent {
  const void* begin;
  uint64_t bytes;
  const int64_t* sizes;  // for the text, which gives bytes if it is null; must outlive the check
  int ndim;
};

class OverlapCheck {
 public:
  // `name` must outlive the check, too.
  void reads(const char* name, const Extent& memory) { note(name, memory, "read"); }

  // After all reads(). Refuses memory that overlaps some that was named before.
  void writes(const char* name, const Extent& memory) {
    if (memory.bytes == 0) return;
    for (int i = 0; i < count_; i++) {
      if (overlap(memory, noted_[i].memory)) refuse(name, memory, noted_[i]);
    }
    note(name, memory, "written");
  }

 private:
  struct Noted {
    Extent memory;
    const char *name, *use;
  };
  static constexpr int kMost = 32;  // more than any call has

  static bool overlap(const Extent& a, const Extent& b) {
    const auto begin = reinterpret_cast<uintptr_t>(a.begin), other = reinterpret_cast<uintptr_t>(b.begin);
    return begin < other + b.bytes && other < begin + a.bytes;
  }
  void note(const char* name, const Extent& memory, const char* use) {
    if (memory.bytes == 0) return;
    EP_CHECK(count_ < kMost, name, " is tensor ", count_ + 1, " of a call, at most ", kMost);
    noted_[count_++] = {memory, name, use};
  }
  [[noreturn]] static void refuse(const char* name, const Extent& memory, const Noted& other);

  Noted noted_[kMost];
  int count_ = 0;
};

}  // namespace ep
