// Parts of a window, which must lie apart.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace ep {

struct Piece {
  uint64_t begin, end;
  std::string name;
};

// No two share a byte, and all lie in the first `window_bytes`.
inline void expect_apart(std::vector<Piece> pieces, uint64_t window_bytes) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  for (size_t i = 0; i + 1 < pieces.size(); i++) {
    ASSERT_LE(pieces[i].end, pieces[i + 1].begin) << pieces[i].name << " overlaps " << pieces[i + 1].name;
  }
  ASSERT_LE(pieces.back().end, window_bytes);
}

}  // namespace ep
