// The sizes that all ranks of one operation agree on.
#pragma once

#include "base/check.h"
#include "base/platform.h"

namespace ep {

constexpr int kMaxTopk = 32;

struct Shape {
  int num_ranks = 1;
  int num_experts = 1;
  int topk = 1;
  int max_tokens = 1;  // tokens a rank may send

  EP_HD int local_experts() const { return num_experts / num_ranks; }
  EP_HD int owner(int expert) const { return expert / local_experts(); }
  EP_HD int local_expert(int expert) const { return expert % local_experts(); }
  EP_HD bool valid(long long expert) const { return expert >= 0 && expert < num_experts; }

  static Shape make(int num_ranks, int num_experts, int topk, int max_tokens) {
    EP_CHECK(num_ranks >= 1, num_ranks, " ranks, must be at least 1");
    EP_CHECK(num_experts >= 1 && num_experts % num_ranks == 0, "num_experts is ", num_experts, ", and ", num_experts,
             " experts do not divide over ", num_ranks, " ranks");
    EP_CHECK(num_experts / num_ranks <= 65534, "num_experts is ", num_experts, ": ", num_experts / num_ranks,
             " experts on a rank, at most 65534");
    EP_CHECK(topk >= 1 && topk <= kMaxTopk, "top-k is ", topk, ", must be 1 to ", kMaxTopk);
    EP_CHECK(max_tokens >= 1, "max_tokens is ", max_tokens, ", must be at least 1");
    return Shape{num_ranks, num_experts, topk, max_tokens};
  }
};

}  // namespace ep
