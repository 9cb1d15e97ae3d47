#include "runtime/ranges.h"

#if defined(EP_WITH_NVTX)
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace ep {

bool has_ranges() {
  static const bool is_on = [] {
    const char* asked = std::getenv("NCCL_EP_NVTX");
    return asked != nullptr ? std::strcmp(asked, "0") != 0 : std::getenv("NVTX_INJECTION64_PATH") != nullptr;
  }();
  return is_on;
}

void Range::open(const std::string& buffer, const char* operation, uint64_t number) {
  nvtxRangePushA(concat(buffer, ' ', operation, ' ', number).c_str());
}

void Range::close() { nvtxRangePop(); }

}  // namespace ep
#else
namespace ep {

bool has_ranges() { return false; }
void Range::open(const std::string&, const char*, uint64_t) {}
void Range::close() {}

}  // namespace ep
#endif
