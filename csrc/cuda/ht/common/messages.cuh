// Op messages: the header, and what ranks tell one another before rows move.
#pragma once

#include "cuda/ht/common/op_context.cuh"
#include "cuda/protocol/headers.cuh"
#include "runtime/ht/params.h"

namespace ep {
inline namespace EP_KERNELS {

// Of a dispatch, the words before the counts.
__device__ __forceinline__ uint32_t message_word_of(const HtDispatchParams& p, int index) {
  if (index == HtMessage::kLayout) return static_cast<uint32_t>(p.output.layout);
  if (index == HtMessage::kCapacity) return static_cast<uint32_t>(p.output.capacity);
  if (index == HtMessage::kAlignment) return static_cast<uint32_t>(p.output.alignment);
  if (index == HtMessage::kChunks) return static_cast<uint32_t>(p.chunks);
  const int part = (index - HtMessage::kOffsets) / 2;
  if (index < HtMessage::kOffsets || part >= kHtMaxParts) return 0;
  const Offset offset = part < p.num_parts ? p.parts[part].out_offset : kNoOffset;
  return static_cast<uint32_t>((index - HtMessage::kOffsets) % 2 == 0 ? offset : offset >> 32);
}

// A block sends every rank of the domain `word_of(i)` for the words behind the op header, up to `words`.
template <class WordOf>
__device__ __forceinline__ void send_message_words(const OpContext& op, const HtOffsets& offsets, const LsaPeers& peers,
                                                   int words, const WordOf& word_of) {
  const NearRanks near = NearRanks::of(peers, offsets.topology.num_ranks);
#pragma unroll 1
  for (int index = OpHeader::kWords + threadIdx.x; index < words; index += blockDim.x) {
    const uint64_t word = tagged(word_of(index), op.tag);
    const Offset offset = offsets.message_word(op.bank, op.rank, index);
    int peer = peers.rank;
#pragma unroll 1
    for (int turn = 0; turn < near.size; turn++) {
      ptx::st_relaxed_sys(peers.at<uint64_t>(peer, offset), word);
      peer = peer + 1 < near.end() ? peer + 1 : near.first;
    }
  }
  testing_point(Point::kAfterHeader, op);
}

// One block sends the whole message.
template <class WordOf>
__device__ __forceinline__ void send_message(const HtOpContext& op, const HtOffsets& offsets, const LsaPeers& peers,
                                             int words, const WordOf& word_of) {
  if (warp_id() == 0) send_header(op, offsets, peers);
  send_message_words(op, offsets, peers, words, word_of);
}

// The same word of the op messages of four sources from `first` on, loaded together. Sources past the last count as 0.
struct MessageWords {
  static constexpr int kBatchSize = 4;
  uint32_t value[kBatchSize];

  __device__ __forceinline__ static MessageWords await(const OpContext& op, const HtOffsets& offsets,
                                                       const LsaPeers& peers, int first, int index) {
    const int ranks = offsets.topology.num_ranks;
    uint64_t seen[kBatchSize];
    const auto word = [&](int q) { return peers.local<uint64_t>(offsets.message_word(op.bank, first + q, index)); };
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) seen[q] = first + q < ranks ? ptx::ld_relaxed_sys(word(q)) : 0;
    MessageWords words;
#pragma unroll
    for (int q = 0; q < kBatchSize; q++) {
      words.value[q] = static_cast<uint32_t>(seen[q]);
      if (first + q >= ranks) {
        words.value[q] = 0;
      } else if (!is_tagged(seen[q], op.tag)) {
        words.value[q] = await_word(WarpContext(op), word(q), Awaited::kRouting, first + q);
      }
    }
    return words;
  }
};

// A word of the ranks before this one, and of all, added up.
struct WordSums {
  int before = 0, all = 0;

  __device__ __forceinline__ static WordSums await(const OpContext& op, const HtOffsets& offsets, const LsaPeers& peers,
                                                   int index) {
    WordSums sums;
#pragma unroll 1
    for (int first = 0; first < offsets.topology.num_ranks; first += MessageWords::kBatchSize) {
      const auto words = MessageWords::await(op, offsets, peers, first, index);
#pragma unroll
      for (int q = 0; q < MessageWords::kBatchSize; q++) {
        if (first + q < peers.rank) sums.before += static_cast<int>(words.value[q]);
        sums.all += static_cast<int>(words.value[q]);
      }
    }
    return sums;
  }
};

__device__ __forceinline__ uint32_t await_message_word(const OpContext& op, const HtOffsets& offsets,
                                                       const LsaPeers& peers, int source, int index) {
  return await_word(WarpContext(op), peers.local<uint64_t>(offsets.message_word(op.bank, source, index)),
                    Awaited::kRouting, source);
}

__device__ __forceinline__ Offset await_message_offset(const OpContext& op, const HtOffsets& offsets,
                                                       const LsaPeers& peers, int source, int index) {
  const uint32_t low = await_message_word(op, offsets, peers, source, index);
  const uint32_t high = await_message_word(op, offsets, peers, source, index + 1);
  return low | static_cast<Offset>(high) << 32;
}

// `source` has sent another op header, or its handle is of another dispatch.
static __device__ __noinline__ void refuse_ht_op(const HtOpContext& op, const HtOffsets& offsets, const LsaPeers& peers,
                                                 int source) {
  refuse_header(op, peers.local<uint64_t>(offsets.message_word(op.bank, source, 0)), source, OpHeader::kHandle,
                op.handle);
}

// A block waits for the op headers of all ranks and compares them. Acquire: see send_header().
__device__ __forceinline__ void await_headers(const HtOpContext& op, const HtOffsets& offsets, const LsaPeers& peers) {
  if (has_bug(Bug::kUncheckedHeaders, op.kind)) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < offsets.topology.num_ranks * OpHeader::kWords; i += blockDim.x) {
    const int source = i / OpHeader::kWords, index = i % OpHeader::kWords;
    const auto* word = peers.local<uint64_t>(offsets.message_word(op.bank, source, index));
    WaitBudget budget;
    uint64_t seen = ptx::ld_acquire_sys(word);
    while (!is_tagged(seen, op.tag) && !budget.is_spent(op, Awaited::kOpHeader, source, op.tag, seen >> 32)) {
      seen = ptx::ld_acquire_sys(word);
    }
    const bool is_compared = index < OpHeader::kComparedWords || index == OpHeader::kHandle;
    const bool differs = is_compared && is_tagged(seen, op.tag) && static_cast<uint32_t>(seen) != op.header_word(index);
    if (differs) refuse_ht_op(op, offsets, peers, source);
  }
}

}  // namespace EP_KERNELS
}  // namespace ep
