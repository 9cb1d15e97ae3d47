#include "transport/host/window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/interruption.h"
#include "transport/collective_step.h"

namespace ep {
namespace {

constexpr const char* kWindow = "its window";

struct Seat {
  ProcessIdentity process;
  uint64_t bytes;
};

// Ranks are threads: each window is freed after the last rank has left, because a slow rank may still store into the
// window of one that is gone.
class HeapWindows : public HostWindows {
 public:
  HeapWindows(Bootstrap& bootstrap, uint64_t bytes) {
    rank_ = bootstrap.rank();
    bytes_ = bytes;
    std::shared_ptr<Block> mine;
    const auto tokens = gather_from_steps(
        bootstrap,
        [&] {
          mine = std::make_shared<Block>(bytes);
          return LocalObjects<Block>::add(mine);
        },
        kWindow);
    on_all_ranks(bootstrap, [&] {
      for (size_t r = 0; r < tokens.size(); r++) take(static_cast<int>(r), tokens[r]);
    });
  }

 private:
  struct Block {
    explicit Block(uint64_t bytes) : memory(static_cast<char*>(std::aligned_alloc(4096, bytes))) {
      if (memory == nullptr) raise(ErrorKind::kSystem, "no memory for a window of ", bytes, " bytes");
    }
    ~Block() { std::free(memory); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    char* const memory;
  };

  void take(int rank, const Token& token) {
    auto block = local_object<Block>(rank, token, kWindow);
    bases_.push_back(block->memory);
    blocks_.push_back(std::move(block));
  }

  std::vector<std::shared_ptr<Block>> blocks_;
};

// ---- Ranks that are processes: each makes an anonymous file, the others open it through /proc while it is held open.
// Nothing is left behind by a process that dies, and /dev/shm, which containers keep small, is not used.

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int fd() const { return fd_; }
  struct stat status() const {
    struct stat status {};
    if (fstat(fd_, &status) != 0) raise(ErrorKind::kSystem, "fstat: ", std::strerror(errno));
    return status;
  }

 private:
  int fd_;
};

class Mapping {
 public:
  Mapping(const File& file, uint64_t bytes)
      : bytes_(bytes), base_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0)) {
    if (base_ == MAP_FAILED) raise(ErrorKind::kSystem, "mmap of ", bytes, " bytes: ", std::strerror(errno));
  }
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  Mapping(Mapping&& other) noexcept : bytes_(other.bytes_), base_(std::exchange(other.base_, nullptr)) {}
  Mapping& operator=(Mapping&&) = delete;
  char* base() const { return static_cast<char*>(base_); }

 private:
  uint64_t bytes_;
  void* base_;
};

// What a rank tells the others so that they can map its window, and know that it is the one.
struct Invitation {
  int64_t pid, fd;
  uint64_t device, inode;
  Token token;  // a part of the file's name
};

std::string name_of(const Token& token) { return "nccl_ep_window." + hex_of(token); }

// Takes the pages of a file now, so that a lack of memory is an error here and not a SIGBUS later. In pieces: a signal
// that comes meanwhile undoes one of them.
void take_pages(int fd, uint64_t bytes) {
  constexpr uint64_t kPiece = 4 << 20;
  for (uint64_t begin = 0; begin < bytes;) {
    const uint64_t piece = std::min(kPiece, bytes - begin);
    const int failed = posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(piece));
    if (failed == 0) begin += piece;
    if (failed == 0 || failed == EINTR) {
      if (has_interruption()) throw Interrupted(concat("to take a window of ", bytes, " bytes"));
      continue;
    }
    raise(ErrorKind::kSystem, "no shared memory for a window of ", bytes, " bytes: ", std::strerror(failed));
  }
}

class SharedWindows : public HostWindows {
 public:
  SharedWindows(Bootstrap& bootstrap, uint64_t bytes) {
    rank_ = bootstrap.rank();
    bytes_ = bytes;
    File file(-1);
    const auto all = gather_from_steps(
        bootstrap,
        [&] {
          const Token token = random_token();
          file = make_file(token);
          const struct stat status = file.status();
          return Invitation{getpid(), file.fd(), status.st_dev, status.st_ino, token};
        },
        kWindow);
    // Every rank says whether it has mapped all windows; only then may the files be closed.
    on_all_ranks(bootstrap, [&] {
      for (size_t r = 0; r < all.size(); r++) {
        const int rank = static_cast<int>(r);
        mappings_.push_back(rank == rank_ ? Mapping(file, bytes) : Mapping(open_file(rank, all[r]), bytes));
        bases_.push_back(mappings_.back().base());
      }
    });
  }

 private:
  // Its size is sealed, so that no rank can make the others' loads and stores fail.
  static constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

  File make_file(const Token& token) const {
    File file(memfd_create(name_of(token).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file.fd() < 0) raise(ErrorKind::kSystem, "memfd_create: ", std::strerror(errno));
    take_pages(file.fd(), bytes_);
    if (fcntl(file.fd(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
      raise(ErrorKind::kSystem, "the size of a window cannot be sealed: ", std::strerror(errno));
    }
    return file;
  }

  // By its name before it is opened, because to open a device or a pipe would already do something.
  File open_file(int rank, const Invitation& other) const {
    const std::string path = concat("/proc/", other.pid, "/fd/", other.fd);
    const std::string expected = concat("/memfd:", name_of(other.token), " (deleted)");
    std::string name(expected.size() + 1, '\0');  // one more, so that a longer name is not the expected one
    const ssize_t length = readlink(path.c_str(), name.data(), name.size());
    if (length < 0) refuse_path(path);
    name.resize(length);
    if (name != expected) {
      raise(ErrorKind::kMismatch, path, ", the window of rank ", rank, ", is ", name, ", expected ", expected);
    }
    File file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.fd() < 0) refuse_path(path);
    const struct stat status = file.status();
    const int seals = fcntl(file.fd(), F_GET_SEALS);
    if (status.st_dev != other.device || status.st_ino != other.inode || seals < 0 || (seals & kSeals) != kSeals ||
        static_cast<uint64_t>(status.st_size) != bytes_) {
      raise(ErrorKind::kMismatch, path, " is not the window of rank ", rank, ": file ", status.st_dev, ":",
            status.st_ino, " of ", status.st_size, " bytes with seals ", seals, ", expected ", other.device, ":",
            other.inode, " of ", bytes_, " bytes with seals ", kSeals);
    }
    return file;
  }
  [[noreturn]] static void refuse_path(const std::string& path) {
    raise(ErrorKind::kSystem, "open ", path, ": ", std::strerror(errno),
          " (ranks must run as one user on one machine)");
  }

  std::vector<Mapping> mappings_;
};

}  // namespace

std::unique_ptr<HostWindows> HostWindows::create(Bootstrap& bootstrap, uint64_t bytes) {
  const ProcessIdentity own = own_process();
  const auto all = gather(bootstrap, Seat{own, bytes}, kWindow);
  bool one_process = true;
  for (size_t r = 0; r < all.size(); r++) {
    one_process = one_process && all[r].process == own;
    for (size_t q = 0; q < r; q++) {
      const ProcessIdentity &a = all[q].process, &b = all[r].process;
      if (a.pid != b.pid || a.number == b.number) continue;
      raise(ErrorKind::kSystem, "ranks ", q, " and ", r, " are two processes, both with the id ", a.pid,
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
