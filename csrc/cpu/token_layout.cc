#include "cpu/token_layout.h"

#include <algorithm>

#include "cpu/ids.h"

namespace ep {

void cpu_token_layout(const TokenLayoutParams& p) {
  const int local_experts = p.num_experts / p.num_ranks, domain_size = p.num_ranks / p.num_domains;
  std::fill_n(p.counts, p.num_counts(), 0);
  std::fill_n(p.is_in_rank, static_cast<int64_t>(p.num_tokens) * p.num_ranks, false);
  for (int token = 0; token < p.num_tokens; token++) {
    bool* is_in_rank = p.is_in_rank + static_cast<int64_t>(token) * p.num_ranks;
    for (int k = 0; k < p.topk; k++) {
      const int64_t id = id_at(p.topk_idx, p.is_idx64, static_cast<int64_t>(token) * p.topk + k);
      if (id < 0 || id >= p.num_experts) continue;
      p.counts[p.expert_bin(static_cast<int>(id))]++;
      is_in_rank[id / local_experts] = true;
    }
    for (int r = 0; r < p.num_ranks; r++) p.counts[r] += is_in_rank[r];
    if (p.num_domains == 1) continue;
    for (int d = 0; d < p.num_domains; d++) {
      const bool* first = is_in_rank + d * domain_size;
      p.counts[p.domain_bin(d)] += std::find(first, first + domain_size, true) != first + domain_size;
    }
  }
}

}  // namespace ep
