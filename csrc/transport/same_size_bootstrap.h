// Byte strings of any length over a way to gather the same number of bytes from every rank.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "transport/transport.h"

namespace ep {

class SameSizeBootstrap : public Bootstrap {
 public:
  SameSizeBootstrap(int rank, int num_ranks) : rank_(rank), num_ranks_(num_ranks) {}
  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }

  std::vector<std::string> allgather(std::string_view mine) override {
    if (num_ranks_ == 1) return {std::string(mine)};
    std::vector<uint64_t> sizes(num_ranks_);
    const uint64_t size = mine.size();
    gather(&size, sizes.data(), sizeof size);
    for (int r = 0; r < num_ranks_; r++) {
      if (sizes[r] > kMaxMessage || (r == rank_ && sizes[r] != size)) {
        raise(ErrorKind::kMismatch, "allgather: rank ", r, " is said to have sent ", sizes[r],
              " bytes; the callback does not put every rank's bytes in rank order");
      }
    }
    const uint64_t longest = *std::max_element(sizes.begin(), sizes.end());
    std::string padded(mine);
    padded.resize(longest);
    std::vector<char> bytes(longest * num_ranks_);
    if (longest > 0) gather(padded.data(), bytes.data(), longest);
    std::vector<std::string> all;
    for (int r = 0; r < num_ranks_; r++) all.emplace_back(bytes.data() + r * longest, sizes[r]);
    return all;
  }

 protected:
  // `bytes` of every rank, in rank order, into `all`.
  virtual void gather(const void* mine, void* all, size_t bytes) = 0;

 private:
  static constexpr uint64_t kMaxMessage = 16u << 20;  // what ranks tell one another is far smaller

  int rank_, num_ranks_;
};

}  // namespace ep
