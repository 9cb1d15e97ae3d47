// Windows of an LSA domain as a kernel sees them: rank r's window starts at base + r * stride in this GPU's addresses.
// NCCL maps them so; a world on one GPU lays its windows out the same way.
#pragma once

#include <cstdint>

#include "base/platform.h"
#include "layout/common/region.h"

namespace ep {

struct LsaPeers {
  char* base = nullptr;
  uint64_t stride = 0;
  int rank = 0;
  bool can_be_masked = false;  // low latency may mask some of them: it has kernels of its own for that
  // Of several domains: the ranks of the own one, and those that a link of low latency serves. `base` is where rank 0
  // would be.
  uint16_t first = 0, size = 0, link_size = 1;

  template <class T>
  EP_HD T* at(int peer, Offset offset) const {
    return reinterpret_cast<T*>(base + peer * stride + offset);
  }
  template <class T>
  EP_HD T* local(Offset offset) const {
    return at<T>(rank, offset);
  }
};

}  // namespace ep
