// An op header that differs from the own one ends the operation, in both modes.
#pragma once

#include "cuda/protocol/wait.cuh"

namespace ep {
inline namespace EP_KERNELS {

__device__ __forceinline__ OpHeader await_header(const OpContext& context, const uint64_t* header, int source) {
  OpHeader theirs;
  for (int i = 0; i < OpHeader::kWords; i++) {
    theirs.words[i] = await_word(WarpContext(context), header + i, Awaited::kOpHeader, source);
  }
  return theirs;
}

// `header`: the words of `source`, which differ from the own op header's.
__device__ __forceinline__ void refuse_header(const OpContext& context, const uint64_t* header, int source) {
  fail(context, Failure::kOtherOp, Awaited::kOpHeader, source, 0, 0, await_header(context, header, source));
}

}  // namespace EP_KERNELS
}  // namespace ep
