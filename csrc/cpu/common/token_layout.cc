#include "cpu/common/token_layout.h"

#include <algorithm>

#include "cpu/common/ids.h"

namespace ep {

void cpu_token_layout(const TokenLayoutParams& p) {
  const int ranks = p.shape.num_ranks, topk = p.shape.topk;
  std::fill_n(p.counts, p.num_counts(), 0);
  std::fill_n(p.is_in_rank, static_cast<int64_t>(p.num_tokens) * ranks, false);
  for (int token = 0; token < p.num_tokens; token++) {
    bool* is_in_rank = p.is_in_rank + static_cast<int64_t>(token) * ranks;
    for (int k = 0; k < topk; k++) {
      const int64_t id = id_at(p.topk_idx, p.is_idx64, static_cast<int64_t>(token) * topk + k);
      if (!p.shape.valid(id)) continue;
      p.counts[p.expert_bin(static_cast<int>(id))]++;
      is_in_rank[p.shape.owner(static_cast<int>(id))] = true;
    }
    for (int r = 0; r < ranks; r++) p.counts[r] += is_in_rank[r];
    if (!p.has_domains()) continue;
    for (int d = 0; d < p.topology.num_domains(); d++) {
      const bool *first = is_in_rank + d * p.topology.domain_size, *end = first + p.topology.domain_size;
      p.counts[p.domain_bin(d)] += std::find(first, end, true) != end;
    }
  }
}

}  // namespace ep
