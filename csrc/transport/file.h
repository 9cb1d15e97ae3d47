// A descriptor of an open file, closed with its owner.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace ep {

class File {
 public:
  File() = default;
  // Negative: none.
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
  int fd_ = -1;
};

}  // namespace ep
