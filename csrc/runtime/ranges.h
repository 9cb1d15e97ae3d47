// Ranges on the time line of a profiler (NVTX): what the host was calling, and in which buffer. They exist where the
// build found NVTX's headers, and are on where a tool is attached (it sets NVTX_INJECTION64_PATH) or NCCL_EP_NVTX=1
// asks for them; NCCL_EP_NVTX=0 turns them off. Otherwise one is a test of a constant.
#pragma once

#include <cstdint>
#include <string>

namespace ep {

bool has_ranges();

// "<buffer> <operation> <number>", from here to the end of the scope.
class Range {
 public:
  Range(const std::string& buffer, const char* operation, uint64_t number) : is_open_(has_ranges()) {
    if (is_open_) open(buffer, operation, number);
  }
  ~Range() {
    if (is_open_) close();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  static void open(const std::string& buffer, const char* operation, uint64_t number);
  static void close();

  const bool is_open_;
};

}  // namespace ep
