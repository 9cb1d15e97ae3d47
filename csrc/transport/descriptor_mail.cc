#include "transport/descriptor_mail.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <string>

#include "base/interruption.h"

namespace ep {
namespace {

// In the abstract namespace: no file is left behind.
struct SocketName {
  sockaddr_un address{};
  socklen_t bytes = 0;

  explicit SocketName(const Token& token) {
    const std::string name = "nccl_ep." + hex_of(token);
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1);  // behind the 0 that makes it abstract
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// A datagram with a descriptor: the sender's secret says who it is.
struct Letter {
  Token secret;
  iovec bytes{&secret, sizeof secret};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};

  Letter() {
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  Letter(const Letter&) = delete;
  Letter& operator=(const Letter&) = delete;
};

}  // namespace

DescriptorMail::DescriptorMail() : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  const SocketName name(address_.name);
  if (socket_.fd() < 0 || bind(socket_.fd(), name.get(), name.bytes) != 0) {
    raise(ErrorKind::kSystem, "a Unix socket: ", std::strerror(errno));
  }
}

// False: there is no room for it now.
bool DescriptorMail::send(int fd, const Token& to, int rank) const {
  const SocketName name(to);
  Letter letter;
  letter.secret = address_.secret;
  letter.header.msg_name = const_cast<sockaddr*>(name.get());
  letter.header.msg_namelen = name.bytes;
  cmsghdr* part = CMSG_FIRSTHDR(&letter.header);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(part), &fd, sizeof fd);
  if (sendmsg(socket_.fd(), &letter.header, MSG_NOSIGNAL) >= 0) return true;
  if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ETOOMANYREFS) return false;
  raise(ErrorKind::kSystem, "to send rank ", rank, " a descriptor: ", std::strerror(errno),
        " (it must run on this machine, share a network namespace, and not have ended)");
}

// False: nothing has come. What strangers send is closed.
bool DescriptorMail::receive(const std::vector<Address>& others, std::vector<File>& received) const {
  Letter letter;
  const ssize_t bytes = recvmsg(socket_.fd(), &letter.header, MSG_CMSG_CLOEXEC);
  if (bytes < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    raise(ErrorKind::kSystem, "to receive a descriptor: ", std::strerror(errno));
  }
  File file;
  const cmsghdr* part = CMSG_FIRSTHDR(&letter.header);
  if (part != nullptr && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
    // Of a stranger they may be two: the padding of `control` has room for another.
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + at, sizeof fd);
      file = File(fd);
    }
  }
  for (size_t i = 0; i < others.size(); i++) {
    if (bytes == sizeof letter.secret && others[i].secret == letter.secret) received[i] = std::move(file);
  }
  return true;
}

std::vector<File> DescriptorMail::exchange(int fd, const std::vector<Address>& others, const std::vector<int>& ranks,
                                           double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::deque<size_t> unsent;
  for (size_t i = 0; i < others.size(); i++) unsent.push_back(i);
  std::vector<File> received(others.size());
  const auto is_missing = [](const File& file) { return file.fd() < 0; };
  while (!unsent.empty() || std::any_of(received.begin(), received.end(), is_missing)) {
    // Those whose sockets are full read them while they try to send.
    while (!unsent.empty() && send(fd, others[unsent.front()].name, ranks[unsent.front()])) unsent.pop_front();
    // Not for as long as something comes: strangers must not keep this rank here beyond its deadline.
    for (size_t i = 0; i <= others.size() && receive(others, received); i++) {
    }
    pollfd come{socket_.fd(), POLLIN, 0};
    poll(&come, 1, unsent.empty() ? 20 : 1);
    if (has_interruption()) throw Interrupted("to exchange descriptors");
    if (std::chrono::steady_clock::now() >= deadline) {
      std::string late;
      for (size_t i = 0; i < ranks.size(); i++) {
        if (is_missing(received[i])) late += concat(late.empty() ? "" : ", ", ranks[i]);
      }
      if (late.empty()) {
        raise(ErrorKind::kTimeout, "rank ", ranks[unsent.front()], " has not taken the descriptor of a window within ",
              seconds, " s");
      }
      raise(ErrorKind::kTimeout, "nothing was heard from rank ", late, ", which was to send the descriptor of its ",
            "window, within ", seconds, " s");
    }
  }
  return received;
}

}  // namespace ep
