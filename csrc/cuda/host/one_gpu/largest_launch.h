// The largest launch that a rank of a world on one GPU needs, which all get: ranks with other outputs have other plans.
#pragma once

#include <algorithm>

namespace ep {

struct LargestLaunch {
  int blocks = 0, threads = 0, bytes = 0;  // blocks: of a rank

  template <class Args>
  static LargestLaunch of(const Args* host_args, int num_ranks) {
    LargestLaunch largest;
    for (int r = 0; r < num_ranks; r++) {
      largest.blocks = std::max(largest.blocks, host_args[r].plan.blocks);
      largest.threads = std::max(largest.threads, host_args[r].plan.threads());
      largest.bytes = std::max(largest.bytes, host_args[r].geometry.bytes);
    }
    return largest;
  }
};

}  // namespace ep
