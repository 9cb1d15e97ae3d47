// What travels: tagged words, rows that announce their own arrival, and the op header that begins every operation.
// docs/wire_format.md shows the bytes.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "base/platform.h"
#include "layout/common/dtype.h"

namespace ep {

enum class Kind : int { kDispatch = 0, kCombine = 1 };  // each has its own epochs, banks and regions
constexpr int kNumKinds = 2;
constexpr int kNumBanks = 2;

// ---- Tagged words: written with one 8-byte store, valid when the tag is the epoch's; never cleaned.
struct alignas(8) TaggedWord {
  uint32_t value;
  uint32_t tag;
};

// Tags skip 0, the content of a new window. A stale tag could only match after 2^32 - 1 calls without a write.
EP_HD uint32_t tag_of(uint64_t epoch) {
  if (epoch < 0xFFFFFFFFull) return static_cast<uint32_t>(epoch) + 1;
  return static_cast<uint32_t>(epoch % 0xFFFFFFFFull) + 1;
}
// Of two calls that are less than 2^31 calls apart.
EP_HD bool is_not_before(uint32_t tag, uint32_t other) { return static_cast<int32_t>(tag - other) >= 0; }
EP_HD int bank_of(uint64_t epoch) { return static_cast<int>(epoch & 1); }

// ---- Rows in band: a bank rests full of kAbsent, any other word has arrived, the reader puts kAbsent back.
constexpr uint32_t kAbsent = 0xFFFFFFFFu;

// Floating-point words: kAbsent is a NaN (a pair of them), and travels as another NaN.
EP_HD uint32_t escape_float(uint32_t word) { return word == kAbsent ? kAbsent - 1 : word; }

// A tagged word that carries a home rank's weight to a combine has the weight's bits, escaped, or this value: its
// choice is skipped.
constexpr uint32_t kSkippedWeight = kAbsent;

// Opaque words keep every bit: a block of 128 words travels as word ^ key, the first key of 0, 1, 2, ... for which no
// word becomes kAbsent. The keys follow the row; a key is at most 128, hence never kAbsent itself.
constexpr int kKeyBlockBytes = 512;
constexpr int kKeyBlockWords = kKeyBlockBytes / 4;
EP_HD uint32_t keyed(uint32_t word, uint32_t key) { return word ^ key; }

// A row: payload, scales (padded to 16 bytes), and for opaque rows one key for each 512 bytes of the two.
struct RowFormat {
  int payload_bytes = 0;
  int scale_bytes = 0;
  bool is_keyed = false;

  EP_HD int scales_offset() const { return payload_bytes; }
  EP_HD int body_bytes() const { return payload_bytes + align_up(scale_bytes, 16); }
  EP_HD int num_keys() const { return is_keyed ? ceil_div(body_bytes(), kKeyBlockBytes) : 0; }
  EP_HD int keys_offset() const { return body_bytes(); }
  EP_HD int wire_bytes() const { return body_bytes() + align_up(num_keys() * 4, 16); }
  EP_HD int stride() const { return align_up(wire_bytes(), 128); }
};

// ---- Heartbeats. With masks, a rank that waits in low latency changes a word at all ranks, kHeartbeatsPerDeadline
// times in a deadline, as it may be waiting for a rank that is gone. A rank that waits for it counts the deadline from
// the last heartbeat, and waits for kMaxDeadlines at most.
constexpr int kHeartbeatsPerDeadline = 16;
constexpr int kMaxDeadlines = 8;

// ---- The op header: the first thing that a rank sends to every other in an operation. Words below kComparedWords must
// be equal on all ranks, and kHandle too. A receiver that sees another header ends the operation, and the error names
// both operations, or, if they are equal but for the word of the handle, both handles.
struct OpHeader {
  enum Word {
    kOperation,
    kHidden,
    kTopk,
    kNumExperts,
    kMaxTokens,
    kScaleBytes,
    kNumTokens,
    kIsMasked,
    kHandle = kIsMasked,     // high throughput
    kLlHandle = kScaleBytes  // low latency, of a combine, which has no scales; the last word that is compared
  };
  // kScaleBytes of high throughput: bytes of all tensors that travel with x. If these are several, the bits above are a
  // hash of their sizes in order. Two tensors that have changed places give another hash, as 8191 is a prime; of other
  // lists one in 8191 gives the same.
  static constexpr int kMetadataBits = 19, kOrders = 8191;
  EP_HD static uint32_t hash_order(uint32_t before, int bytes) { return (31 * before + bytes) % kOrders; }
  static constexpr int kComparedWords = kNumTokens;  // each rank has its own number of tokens
  static constexpr int kWords = 8;                   // stride of a header in tagged words

  // Operation | dtype << 8 | quant << 16 | wire dtype << 24, elements of a row, top-k, experts, max_tokens, bytes of
  // scales of a row, tokens of the sender. Low latency: 1 for a receiver that the sender has masked. kHandle,
  // kLlHandle: the tag of the dispatch whose handle the operation was given; kHandle: 0 if it makes one.
  uint32_t words[kWords] = {};

  EP_HD uint32_t word(int index) const { return words[index]; }
};

enum class Operation : int {
  kDispatch = 1,
  kCombine = 2,
  kCombineWeighted = 3,
  kCombineWeights = 4,
  // High throughput.
  kHtDispatch = 6,
  kHtRoute = 7,   // exact sizes: the counts
  kHtSend = 8,    // exact sizes: the rows
  kHtCached = 9,  // rows along the routes of a handle
  kHtCombine = 10,
  kHtCombineWeighted = 11,
  kHtCombineWeights = 12,
  // Low latency again: a combine with weights of the home rank that is split, and sends rows instead of sums.
  kCombineUnweighted = 13,
  kDispatchAllWeights = 14,  // low latency: DispatchOptions::all_weights
};

EP_HD bool is_high_throughput(const OpHeader& header) {
  const uint32_t operation = header.word(OpHeader::kOperation) & 0xFF;
  return operation >= static_cast<uint32_t>(Operation::kHtDispatch) &&
         operation <= static_cast<uint32_t>(Operation::kHtCombineWeights);
}

EP_HD uint32_t pack_operation(Operation operation, DType dtype, Quant quant, DType wire_dtype) {
  return static_cast<uint32_t>(operation) | static_cast<uint32_t>(dtype) << 8 | static_cast<uint32_t>(quant) << 16 |
         static_cast<uint32_t>(wire_dtype) << 24;
}

// ---- Expert ids travel as local ids of the destination, 8 bits each where they fit.
struct IdFormat {
  int bits = 8;
  int num_words = 2;  // tagged words of a token, even, so that pairs are read with one 16-byte load

  EP_HD static IdFormat make(int local_experts, int topk) {
    const int bits = local_experts <= 254 ? 8 : 16;
    return IdFormat{bits, align_up(ceil_div(topk, 32 / bits), 2)};
  }
  EP_HD uint32_t none() const { return bits == 8 ? 0xFFu : 0xFFFFu; }
  EP_HD int per_word() const { return bits == 8 ? 4 : 2; }
  EP_HD int words() const { return num_words; }
  EP_HD uint32_t get(uint32_t word, int index_in_word) const { return word >> (index_in_word * bits) & none(); }
};

}  // namespace ep
