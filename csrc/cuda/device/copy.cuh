// Copies of a warp, by the widest words that addresses and sizes allow.
#pragma once

#include "cuda/device/lanes.cuh"

namespace ep {

template <class Word>
__device__ __forceinline__ void copy_words(char* out, const char* in, int bytes, int lane) {
  for (int i = lane; i < bytes / static_cast<int>(sizeof(Word)); i += 32) {
    reinterpret_cast<Word*>(out)[i] = reinterpret_cast<const Word*>(in)[i];
  }
}

// By the widest words that sizes and addresses allow.
static __device__ __noinline__ void copy_bytes(char* out, const char* in, int bytes, int width, int lane) {
  if (width == 16) return copy_words<uint4>(out, in, bytes, lane);
  if (width == 8) return copy_words<uint64_t>(out, in, bytes, lane);
  if (width == 4) return copy_words<uint32_t>(out, in, bytes, lane);
  if (width == 2) return copy_words<uint16_t>(out, in, bytes, lane);
  copy_words<uint8_t>(out, in, bytes, lane);
}

// The widest word of which sizes and addresses, all their bits in `bits`, are multiples: up to `most` bytes.
__device__ __forceinline__ int word_bytes(unsigned bits, unsigned most) {
  return static_cast<int>(min(bits & ~(bits - 1), most));
}

}  // namespace ep
