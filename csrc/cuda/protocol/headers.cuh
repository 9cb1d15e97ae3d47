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

// `header`: the words of `source`, which differ from the own op header's. `handle`: the own word number `handle_word`,
// of which dispatch the handle is; -1: the operation makes one.
__device__ __forceinline__ void refuse_header(const OpContext& context, const uint64_t* header, int source,
                                              int handle_word, uint32_t handle) {
  const OpHeader theirs = await_header(context, header, source);
  bool is_other = handle_word < 0;
  for (int i = 0; i < OpHeader::kComparedWords; i++) {
    is_other |= i != handle_word && theirs.word(i) != context.header->word(i);
  }
  if (is_other) return fail(context, Failure::kOtherOp, Awaited::kOpHeader, source, 0, 0, theirs);
  fail(context, Failure::kOtherHandle, Awaited::kOpHeader, source, handle, theirs.word(handle_word), theirs);
}

}  // namespace EP_KERNELS
}  // namespace ep
