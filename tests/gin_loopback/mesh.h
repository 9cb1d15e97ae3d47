// The ranks' sockets to one another: AF_UNIX in the abstract name space, so that memory handles can be sent.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gin_loopback {

constexpr int kMaxSegments = 32;

// A message of one kind, for all that ranks tell one another.
struct Message {
  enum Kind : uint32_t { kHello = 1, kMailbox, kRegion, kReady };
  Kind kind = kHello;
  uint32_t rank = 0;
  uint64_t number = 0;  // of a region
  uint64_t bytes = 0, offset = 0, address = 0;
  int64_t pid = 0;
  uint32_t type = 0, num_segments = 0;
  uint64_t segment_bytes[kMaxSegments] = {};
  char gpu[16] = {};  // the sender's, by UUID
};

// Where a rank listens; it travels through NCCL's bootstrap.
struct Handle {
  char magic[8] = {'g', 'i', 'n', 'l', 'o', 'o', 'p', '1'};
  char name[96] = {};  // of the socket, without the zero before it
};
static_assert(sizeof(Handle) <= 128, "NCCL's handles have 128 bytes");

class Listener {
 public:
  Listener();  // throws std::runtime_error, as everything here
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  const Handle& handle() const { return handle_; }
  int fd() const { return fd_; }

 private:
  Handle handle_;
  int fd_ = -1;
};

class Mesh {
 public:
  // Every rank connects to those below it and accepts those above it.
  Mesh(const std::vector<Handle>& handles, int rank, const Listener& listener, double timeout_s);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Collective: what every rank sends, with its file descriptors, which the receiver owns.
  struct Received {
    Message message;
    std::vector<int> fds;
  };
  std::vector<Received> exchange(Message mine, const std::vector<int>& fds);
  bool has_gone(int rank) const;

 private:
  int rank_;
  double timeout_s_;
  std::vector<int> sockets_;
};

}  // namespace gin_loopback
