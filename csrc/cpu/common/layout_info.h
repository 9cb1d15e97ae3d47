// Counts and ids as NCCL EP's callers have them, on the host.
#pragma once

#include "runtime/common/layout_info.h"

namespace ep {

inline void cpu_layout_info(const LayoutInfoParams& params) {
  params.write_counts();
  for (int64_t i = 0; i < params.num_ids; i++) params.write_id(i);
}

}  // namespace ep
