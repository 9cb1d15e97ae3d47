// What a caller asks of a dispatch or a combine beside its tensors, and what of it may stand together: one rule for
// Python, for the ops of torch and for the C library.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "layout/common/block_formats.h"
#include "layout/common/dtype.h"
#include "layout/common/outputs.h"
#include "runtime/options.h"

namespace ep {

enum class Mode : int { kLl, kHt, kAuto };
constexpr std::array<const char*, 3> kModeNames{"ll", "ht", "auto"};  // as callers write them

constexpr int64_t kExactCapacity = -1;  // as a capacity: as many rows as come

// Low latency or high throughput, from what is equal on all ranks: never from the tokens that one of them happens to
// have. row_bytes: of a row of x. ll_max_tokens: of a buffer whose part for low latency is smaller; none: it is not.
bool auto_is_ht(int64_t max_tokens, int64_t row_bytes, int64_t topk, int64_t num_ranks,
                std::optional<int64_t> ll_max_tokens = {});

struct DispatchCall {
  Mode mode = Mode::kLl;
  DispatchConfig config;  // all but max_tokens
  std::optional<int64_t> max_tokens;
  std::optional<int64_t> capacity;  // rows; none: as many as always suffice
  bool is_exact = false;            // in place of a capacity: as many as come
  int64_t row_bytes = 0;            // of a row of x; for kAuto
  std::optional<int64_t> ll_max_tokens;

  // What an op takes.
  struct Checked {
    bool is_ht;
    int64_t capacity;  // a number of rows, or kExactCapacity
    DispatchConfig config;
  };
  // Refuses what may not stand together.
  Checked check(int num_ranks) const;

 private:
  int64_t check_capacity(bool is_ht, int num_ranks, const DispatchConfig& checked) const;
};

// Rows that suffice for any routing in which no token names an expert twice.
int64_t default_capacity_of(int num_ranks, const RoutingNumbers& routing);

// How the rows of a layout are weighted where the caller asks for the weights of the dispatch: those of whole tokens
// the caller has weighted.
inline Weighting weighting_by_dispatch(OutputLayout layout) {
  return has_expert_rows(layout) ? Weighting::kDispatch : Weighting::kNone;
}
// Partial sums travel as the output, or wider; to 16 bits also as blocks of fewer bits.
inline bool can_travel_as(DType wire, DType out) { return wire == out || wire == DType::kF32 || is_block_format(wire); }

}  // namespace ep
