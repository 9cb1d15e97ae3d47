// A GPU's clock beside the host's. They drift apart by some microseconds in a second, so that one is looked at again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace ep {

class GpuClock {
 public:
  static constexpr int64_t kEveryNs = 1000 * 1000 * 1000;

  bool is_due(int64_t host_ns) const { return host_ns - looked_at_ns_ >= kEveryNs; }
  // A look is some times of the GPU, each with a time of the host that is not before it. The nearest counts. A look
  // without an end changes nothing.
  void begin_look(int64_t host_ns) {
    looked_at_ns_ = host_ns;
    nearest_ns_ = std::numeric_limits<int64_t>::max();
  }
  void add(uint64_t gpu_ns, int64_t host_ns) {
    nearest_ns_ = std::min(nearest_ns_, host_ns - static_cast<int64_t>(gpu_ns));
  }
  void end_look() { to_host_ns_ = nearest_ns_; }

  int64_t on_host(uint64_t gpu_ns) const { return static_cast<int64_t>(gpu_ns) + to_host_ns_; }

 private:
  int64_t looked_at_ns_ = 0, nearest_ns_ = 0, to_host_ns_ = 0;
};

}  // namespace ep
