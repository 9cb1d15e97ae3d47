// Sets of ranks: the one type for them, on the host and on GPUs.
#pragma once

#include <cstdint>

#include "base/platform.h"

namespace ep {

// Ranks that a world has at most.
constexpr int kMaxRanks = 2048;

// A bit for each rank, in words of 32.
struct RankMask {
  static constexpr int kWords = kMaxRanks / 32;
  uint32_t words[kWords] = {};

  EP_HD static int word_of(int rank) { return rank >> 5; }
  EP_HD static uint32_t bit_of(int rank) { return 1u << (rank & 31); }
  // Words that have the bits of so many ranks.
  EP_HD static int words_of(int num_ranks) { return (num_ranks + 31) >> 5; }

  EP_HD bool has(int rank) const { return (words[word_of(rank)] & bit_of(rank)) != 0; }
  EP_HD void add(int rank) { words[word_of(rank)] |= bit_of(rank); }
  EP_HD void remove(int rank) { words[word_of(rank)] &= ~bit_of(rank); }

  bool any() const {
    for (const uint32_t word : words) {
      if (word != 0) return true;
    }
    return false;
  }
  // Of ranks `first` to first + count - 1.
  bool has_all(int first, int count) const {
    for (int rank = first; rank < first + count; rank++) {
      if (!has(rank)) return false;
    }
    return true;
  }
  bool has_all(const RankMask& others) const {
    for (int w = 0; w < kWords; w++) {
      if ((others.words[w] & ~words[w]) != 0) return false;
    }
    return true;
  }
  RankMask operator|(const RankMask& other) const {
    RankMask both = *this;
    for (int w = 0; w < kWords; w++) both.words[w] |= other.words[w];
    return both;
  }
  RankMask operator&(const RankMask& other) const {
    RankMask both = *this;
    for (int w = 0; w < kWords; w++) both.words[w] &= other.words[w];
    return both;
  }
  // Those that are not among `others`.
  RankMask without(const RankMask& others) const {
    RankMask rest = *this;
    for (int w = 0; w < kWords; w++) rest.words[w] &= ~others.words[w];
    return rest;
  }
  // Of `num_ranks` ranks all but these.
  RankMask complement(int num_ranks) const {
    RankMask all;
    for (int rank = 0; rank < num_ranks; rank++) all.add(rank);
    return all.without(*this);
  }
};

}  // namespace ep
