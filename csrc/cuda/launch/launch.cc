#include "cuda/ht/expert_map.h"
#include "cuda/ht/layout_info.h"
#include "cuda/ht/observed_counts.h"
#include "cuda/ht/token_layout.h"
#include "cuda/launch/launch_util.h"

namespace ep {

void load_kernels(const KernelSets& sets) {
  load_layout_info_kernel();
  load_token_layout_kernel();
  load_expert_map_kernel();
  load_observed_counts_kernels();
  if (sets.ll && sets.masks_ranks) {
    load_masking_dispatch_kernels();
    load_masking_combine_kernels();
  } else if (sets.ll) {
    load_dispatch_kernels();
    load_combine_kernels();
  }
  if (sets.ht) {
    load_ht_route_kernels();
    load_ht_dispatch_kernels();
    load_ht_combine_kernels();
  }
}

}  // namespace ep
