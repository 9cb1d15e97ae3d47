// What the params of both modes have in common.
#pragma once

#include <cstdint>

#include "base/check.h"

namespace ep {

// The stride of `count` elements of at most 8 bytes. One element has none; refuses one that leads out of any memory.
inline int64_t usable_stride(int64_t count, int64_t stride) {
  constexpr int64_t kFarthest = INT64_MAX / 32;
  if (count <= 1) return 0;
  EP_CHECK(stride <= kFarthest / count && stride >= -(kFarthest / count), "a stride of ", stride, " between ", count,
           " elements: no memory is as large");
  return stride;
}

}  // namespace ep
