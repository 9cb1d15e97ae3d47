#include "base/check.h"
#include "cuda/ht/token_layout.h"
#include "cuda/launch/launch_util.h"
#include "cuda/testing/stamps.h"

namespace ep {

void load_kernels(bool masks_ranks) {
  load_dispatch_kernels();
  load_combine_kernels();
  load_ht_route_kernels();
  load_ht_dispatch_kernels();
  load_ht_combine_kernels();
  load_token_layout_kernel();
  if (!masks_ranks) return;
  load_masking_dispatch_kernels();
  load_masking_combine_kernels();
}

std::vector<std::vector<uint64_t>> take_stamps(std::string_view kernel) {
  if (kernel == "ll_dispatch") return dispatch_stamps();
  if (kernel == "ll_combine") return combine_stamps();
  if (kernel == "ht_route") return ht_route_stamps();
  if (kernel == "ht_dispatch") return ht_dispatch_stamps();
  if (kernel == "ht_combine") return ht_combine_stamps();
  raise(ErrorKind::kInvalidArgument, "no kernel ", kernel,
        ": ll_dispatch, ll_combine, ht_route, ht_dispatch or ht_combine");
}

}  // namespace ep
