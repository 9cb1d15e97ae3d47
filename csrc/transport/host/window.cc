#include "transport/host/window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/check.h"
#include "base/interruption.h"

namespace ep {
namespace {

// What a rank sends the others so that they can map its window.
struct Invitation {
  int64_t pid;
  uint64_t process;  // a random number: in containers, two processes may have one pid
  int64_t fd;
  uint64_t address;
  uint64_t bytes;
};

uint64_t process_number() {
  static const uint64_t number = static_cast<uint64_t>(std::random_device{}()) << 32 | std::random_device{}();
  return number;
}

std::vector<Invitation> exchange(Bootstrap& bootstrap, const Invitation& mine) {
  const auto texts = bootstrap.allgather({reinterpret_cast<const char*>(&mine), sizeof mine});
  std::vector<Invitation> all(texts.size());
  for (size_t r = 0; r < texts.size(); r++) {
    if (texts[r].size() != sizeof(Invitation)) {
      raise(ErrorKind::kMismatch, "rank ", r, " sent ", texts[r].size(), " bytes to describe its window, expected ",
            sizeof(Invitation));
    }
    std::memcpy(&all[r], texts[r].data(), sizeof(Invitation));
  }
  return all;
}

// Ranks are threads: a shared counter of users frees each window after the last rank has left, because a slow rank
// may still store into the window of one that is gone.
class HeapWindows : public HostWindows {
 public:
  struct Block {
    std::atomic<int> users;
    char* memory;
  };

  HeapWindows(Bootstrap& bootstrap, uint64_t bytes) {
    rank_ = bootstrap.rank();
    bytes_ = bytes;
    auto* mine = new Block{{bootstrap.num_ranks()}, static_cast<char*>(std::aligned_alloc(4096, bytes))};
    if (mine->memory == nullptr) {
      delete mine;
      raise(ErrorKind::kSystem, "no memory for a window of ", bytes, " bytes");
    }
    for (const Invitation& other :
         exchange(bootstrap, {getpid(), process_number(), -1, reinterpret_cast<uint64_t>(mine), bytes})) {
      blocks_.push_back(reinterpret_cast<Block*>(other.address));
      bases_.push_back(blocks_.back()->memory);
    }
  }
  ~HeapWindows() override {
    for (Block* block : blocks_) {
      if (block->users.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::free(block->memory);
        delete block;
      }
    }
  }

 private:
  std::vector<Block*> blocks_;
};

// Takes the pages of a file now, so that a lack of memory is an error here and not a SIGBUS later. In pieces: a signal
// that comes meanwhile undoes one of them. The file is closed if it fails.
void take_pages(int fd, uint64_t bytes) {
  constexpr uint64_t kPiece = 4 << 20;
  for (uint64_t begin = 0; begin < bytes;) {
    const uint64_t piece = std::min(kPiece, bytes - begin);
    const int failed = posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(piece));
    if (failed == 0) begin += piece;
    if (failed == 0 || failed == EINTR) {
      if (!has_interruption()) continue;
      close(fd);
      throw Interrupted(concat("to take a window of ", bytes, " bytes"));
    }
    close(fd);
    raise(ErrorKind::kSystem, "no shared memory for a window of ", bytes, " bytes: ", std::strerror(failed));
  }
}

// Ranks are processes: each makes an anonymous file, the others open it through /proc while it is held open. Nothing is
// left behind by a process that dies, and /dev/shm, which containers keep small, is not used.
class SharedWindows : public HostWindows {
 public:
  SharedWindows(Bootstrap& bootstrap, uint64_t bytes) {
    rank_ = bootstrap.rank();
    bytes_ = bytes;
    const int fd = memfd_create("nccl_ep_window", MFD_CLOEXEC);
    if (fd < 0) raise(ErrorKind::kSystem, "memfd_create: ", std::strerror(errno));
    take_pages(fd, bytes);
    const auto all = exchange(bootstrap, {getpid(), process_number(), fd, 0, bytes});
    std::string problem;
    for (size_t r = 0; r < all.size() && problem.empty(); r++) problem = map(static_cast<int>(r), all[r], fd);
    // Every rank says whether it has mapped all windows; only then may the files be closed.
    const auto outcomes = bootstrap.allgather(problem);
    close(fd);
    for (size_t r = 0; r < outcomes.size(); r++) {
      if (!outcomes[r].empty()) {
        unmap();
        raise(ErrorKind::kSystem, "rank ", r, " cannot map the windows: ", outcomes[r]);
      }
    }
  }
  ~SharedWindows() override { unmap(); }

 private:
  std::string map(int rank, const Invitation& other, int own_fd) {
    const std::string path = concat("/proc/", other.pid, "/fd/", other.fd);
    const int fd = rank == rank_ ? own_fd : open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
      return concat("open ", path, ": ", std::strerror(errno), " (ranks must run as one user on one machine)");
    }
    void* base = mmap(nullptr, other.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (rank != rank_) close(fd);
    if (base == MAP_FAILED) return concat("mmap of ", other.bytes, " bytes: ", std::strerror(errno));
    bases_.push_back(static_cast<char*>(base));
    return "";
  }
  void unmap() {
    for (char* base : bases_) munmap(base, bytes_);
    bases_.clear();
  }
};

}  // namespace

std::unique_ptr<HostWindows> HostWindows::create(Bootstrap& bootstrap, uint64_t bytes) {
  const auto all = exchange(bootstrap, {getpid(), process_number(), -1, 0, bytes});
  bool one_process = true;
  for (size_t r = 0; r < all.size(); r++) {
    one_process = one_process && all[r].pid == getpid();
    for (size_t q = 0; q < r; q++) {
      if (all[q].pid != all[r].pid || all[q].process == all[r].process) continue;
      raise(ErrorKind::kSystem, "ranks ", q, " and ", r, " are two processes, both with the id ", all[r].pid,
            ": ranks in containers must share a process namespace");
    }
    if (all[r].bytes != bytes) {
      raise(ErrorKind::kMismatch, "rank ", r, " asks for a window of ", all[r].bytes, " bytes, rank ", bootstrap.rank(),
            " for ", bytes);
    }
  }
  if (one_process) return std::make_unique<HeapWindows>(bootstrap, bytes);
  return std::make_unique<SharedWindows>(bootstrap, bytes);
}

}  // namespace ep
