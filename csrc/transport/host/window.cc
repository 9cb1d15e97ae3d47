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
#include "transport/file.h"

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

class Mapping {
 public:
  Mapping(const File& file, uint64_t bytes) : bytes_(bytes), base_(map(nullptr, MAP_SHARED, file.fd())) {}
  // Of nobody: pages come when they are written.
  explicit Mapping(uint64_t bytes)
      : bytes_(bytes), base_(map(nullptr, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1)) {}
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, bytes_);
  }
  Mapping(Mapping&& other) noexcept : bytes_(other.bytes_), base_(std::exchange(other.base_, nullptr)) {}
  Mapping& operator=(Mapping&&) = delete;
  char* base() const { return static_cast<char*>(base_); }
  // Another file at the same address.
  void exchange(const File& file) { map(base_, MAP_SHARED | MAP_FIXED, file.fd()); }

 private:
  void* map(void* at, int flags, int fd) const {
    void* const base = mmap(at, bytes_, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (base == MAP_FAILED) raise(ErrorKind::kSystem, "mmap of ", bytes_, " bytes: ", std::strerror(errno));
    return base;
  }

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

// Whether all ranks that meet are threads of one process. Throws where they cannot share windows.
bool check_members(Bootstrap& bootstrap, uint64_t bytes) {
  const ProcessIdentity own = own_process();
  const auto all = gather(bootstrap, Seat{own, bytes}, kWindow);
  bool one_process = true;
  for (size_t r = 0; r < all.size(); r++) {
    const int rank = bootstrap.rank_at(static_cast<int>(r));
    one_process = one_process && all[r].process == own;
    for (size_t q = 0; q < r; q++) {
      const ProcessIdentity &a = all[q].process, &b = all[r].process;
      if (a.pid != b.pid || a.number == b.number) continue;
      raise(ErrorKind::kSystem, "ranks ", bootstrap.rank_at(static_cast<int>(q)), " and ", rank,
            " are two processes, both with the id ", a.pid, ": ranks in containers must share a process namespace");
    }
    if (all[r].bytes != bytes) {
      raise(ErrorKind::kMismatch, "rank ", rank, " asks for a window of ", all[r].bytes, " bytes, rank ",
            bootstrap.own_rank(), " for ", bytes);
    }
  }
  return one_process;
}

class SharedWindows : public HostWindows {
 public:
  SharedWindows(Bootstrap& bootstrap, int num_ranks, uint64_t bytes, bool is_elastic) {
    rank_ = bootstrap.own_rank();
    bytes_ = bytes;
    const auto all = invite(bootstrap);
    // Every rank says whether it has mapped all windows; only then may the files be closed.
    on_all_ranks(bootstrap, [&] {
      for (int rank = 0; rank < num_ranks; rank++) {
        const Invitation* other = find(bootstrap, all, rank);
        if (rank == rank_) {
          mappings_.emplace_back(file_, bytes);
        } else if (other != nullptr) {
          mappings_.emplace_back(open_file(rank, *other), bytes);
        } else {
          mappings_.emplace_back(bytes);
        }
        bases_.push_back(mappings_.back().base());
      }
    });
    if (!is_elastic) file_ = File();
  }

  void replace(Bootstrap& bootstrap, int rank) override {
    check_members(bootstrap, bytes_);
    const auto all = invite(bootstrap);
    on_all_ranks(bootstrap, [&] { mappings_[rank].exchange(open_file(rank, *find(bootstrap, all, rank))); });
  }

 private:
  std::vector<Invitation> invite(Bootstrap& bootstrap) {
    return gather_from_steps(
        bootstrap,
        [&] {
          if (file_.fd() < 0) {
            token_ = random_token();
            file_ = make_file(token_);
          }
          const struct stat status = file_.status();
          return Invitation{getpid(), file_.fd(), status.st_dev, status.st_ino, token_};
        },
        kWindow);
  }
  // Null: the rank is not among those who meet.
  static const Invitation* find(const Bootstrap& bootstrap, const std::vector<Invitation>& all, int rank) {
    for (size_t seat = 0; seat < all.size(); seat++) {
      if (bootstrap.rank_at(static_cast<int>(seat)) == rank) return &all[seat];
    }
    return nullptr;
  }

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

  Token token_;
  File file_;  // of the own window: while ranks map it, and of elastic windows always
  std::vector<Mapping> mappings_;
};

}  // namespace

void HostWindows::replace(Bootstrap&, int rank) {
  raise(ErrorKind::kInvalidUsage, "the window of rank ", rank, " cannot be exchanged: windows are not elastic");
}

std::unique_ptr<HostWindows> HostWindows::create(Bootstrap& bootstrap, uint64_t bytes) {
  if (check_members(bootstrap, bytes)) return std::make_unique<HeapWindows>(bootstrap, bytes);
  return std::make_unique<SharedWindows>(bootstrap, bootstrap.num_ranks(), bytes, /*is_elastic=*/false);
}

std::unique_ptr<HostWindows> HostWindows::create_elastic(Bootstrap& bootstrap, int num_ranks, uint64_t bytes) {
  check_members(bootstrap, bytes);
  return std::make_unique<SharedWindows>(bootstrap, num_ranks, bytes, /*is_elastic=*/true);
}

}  // namespace ep
