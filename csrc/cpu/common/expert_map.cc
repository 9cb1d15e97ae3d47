#include "cpu/common/expert_map.h"

#include "base/check.h"
#include "cpu/common/ids.h"

namespace ep {

void cpu_map_experts(const ExpertMapParams& p) {
  for (int i = 0; i < p.num_choices(); i++) {
    const int64_t id = id_at(p.topk_idx, p.is_idx64, i);
    EP_CHECK(id == -1 || p.is_logical(id), "topk_idx[", i / p.topk, ", ", i % p.topk, "] is ", id,
             ", must be -1 or a logical expert, 0 to ", p.num_logical - 1);
    EP_CHECK(p.physical(id, i) != p.kNoExpert, "logical_count[", id, "] is ", p.replicas_of[id], ", must be 1 to ",
             p.max_replicas);
  }
  for (int i = 0; i < p.num_choices(); i++) {
    const int64_t id = id_at(p.topk_idx, p.is_idx64, i);
    set_id(p.out, p.is_idx64, i, static_cast<int32_t>(p.physical(id, i)));
    if (p.load != nullptr && id >= 0) p.load[id]++;
  }
}

}  // namespace ep
