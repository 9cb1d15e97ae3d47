// Windows in host memory: the heap when all ranks are threads of one process, an anonymous shared file (memfd) when
// they are processes of one machine. Every rank maps every window; the transport decides which it may access. Elastic
// windows are always shared files, so that the window of a rank that is replaced can be exchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace ep {

class HostWindows {
 public:
  static std::unique_ptr<HostWindows> create(Bootstrap& bootstrap, uint64_t bytes);
  // Of a world of so many ranks. Those who do not meet have memory that nobody reads until they are replaced.
  static std::unique_ptr<HostWindows> create_elastic(Bootstrap& bootstrap, int num_ranks, uint64_t bytes);
  virtual ~HostWindows() = default;
  // Of elastic windows: `rank`, which calls create_elastic(), has a new window, at the old address. Collective.
  virtual void replace(Bootstrap& bootstrap, int rank);

  int rank() const { return rank_; }
  uint64_t bytes() const { return bytes_; }
  char* base(int rank) const { return bases_[rank]; }

 protected:
  int rank_ = 0;
  uint64_t bytes_ = 0;
  std::vector<char*> bases_;
};

}  // namespace ep
