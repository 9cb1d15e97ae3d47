#include "cuda/launch_util.h"
#include "cuda/stamps.h"

namespace ep {

void load_kernels() {
  load_dispatch_kernels();
  load_combine_kernels();
  load_ht_dispatch_kernels();
  load_ht_combine_kernels();
}

std::vector<std::vector<uint64_t>> take_stamps(bool combine, bool ht) {
  if (ht) return combine ? ht_combine_stamps() : ht_dispatch_stamps();
  return combine ? combine_stamps() : dispatch_stamps();
}

}  // namespace ep
