// The next dispatch of a buffer tells of its blocks of rows as they arrive (runtime/common/arrivals.h). The schemas do
// not say that `state` changes: a compiler would give the ops a copy of it, where no consumer looks.
#include <torch/library.h>

#include "torch/ops/fast_call.h"
#include "torch/ops/run.h"

namespace ep {
namespace {

// Without `state` the next dispatch tells nothing.
void announce_rows(const at::Tensor& seq, const OptionalTensor& state, int64_t blocks, int64_t rows_per_block) {
  guarded([&] {
    const auto registered = find_group(seq);
    Arrivals arrivals;
    if (state) {
      EP_CHECK(rows_per_block >= 1 && rows_per_block <= INT32_MAX, "rows_per_block is ", rows_per_block,
               ", must be from 1 to ", INT32_MAX);
      EP_CHECK(blocks >= 1 && blocks <= Arrivals::kMostBlocks, "blocks is ", blocks, ", must be from 1 to ",
               Arrivals::kMostBlocks);
      check_tensor(*state, "state", at::kInt, {Arrivals::words_for(blocks)}, device_of(*registered->group));
      check_aligned(*state, "state");
      arrivals = {state->data_ptr<int32_t>(), static_cast<int>(blocks), static_cast<int>(rows_per_block)};
    }
    registered->arrivals = arrivals;
  });
}

// From now on words of earlier dispatches are old. On the current stream.
void begin_arrivals(const at::Tensor& seq, const at::Tensor& state) {
  guarded([&] {
    const OnGroup on(seq);
    EP_CHECK(state.numel() > Arrivals::kHeader, "state has ", state.numel(), " words, must have more than ",
             static_cast<int>(Arrivals::kHeader));
    check_tensor(state, "state", at::kInt, {state.numel()}, on.device);
    state.narrow(0, Arrivals::kExpected, 1).add_(1);
  });
}

fast_call::Op arrivals_ops[] = {EP_OP(announce_rows), EP_OP(begin_arrivals)};

}  // namespace
}  // namespace ep

TORCH_LIBRARY_FRAGMENT(nccl_ep, library) {
  library.def("announce_rows(Tensor(a!) seq, Tensor? state, int blocks, int rows_per_block) -> ()");
  library.def("begin_arrivals(Tensor(a!) seq, Tensor state) -> ()");
}

EP_IMPLEMENT(arrivals_ops)
