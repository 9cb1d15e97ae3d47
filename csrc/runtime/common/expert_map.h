// From the experts that a router knows to the copies of them that ranks have.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace ep {

// Choices of logical experts [T, K] become choices of physical ones. No other rank takes part.
struct ExpertMapParams {
  int num_tokens = 0, topk = 0;
  int num_logical = 0, max_replicas = 0;  // E, X
  int rank = 0;                           // of the caller: ranks begin with other replicas
  bool is_idx64 = true;
  const void* topk_idx = nullptr;              // [T, K]
  const int64_t* physical_of = nullptr;        // [E, X]
  const int64_t* replicas_of = nullptr;        // [E], how many of X there are
  void* out = nullptr;                         // [T, K]
  int64_t* load = nullptr;                     // [E], to which choices are added; null: they are not counted
  static constexpr int kNoExpert = INT32_MAX;  // an id that every dispatch refuses

  EP_HD int num_choices() const { return num_tokens * topk; }
  EP_HD bool is_logical(int64_t id) const { return id >= 0 && id < num_logical; }
  // The replicas of an expert take turns, from token to token and from rank to rank.
  EP_HD int64_t physical(int64_t id, int choice) const {
    if (id < 0) return id;
    if (id >= num_logical) return kNoExpert;
    const int64_t replicas = replicas_of[id];
    if (replicas < 1 || replicas > max_replicas) return kNoExpert;
    const auto turn = static_cast<uint32_t>(choice / topk) + static_cast<uint32_t>(rank);
    return physical_of[id * max_replicas + turn % static_cast<uint32_t>(replicas)];
  }
};

}  // namespace ep
