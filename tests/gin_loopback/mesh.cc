#include "mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <random>
#include <stdexcept>

namespace gin_loopback {
namespace {

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }
[[noreturn]] void fail_with_errno(const std::string& text) { fail(text + ": " + std::strerror(errno)); }

int new_socket() {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) fail_with_errno("socket");
  return fd;
}

socklen_t address_of(const Handle& handle, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path + 1, handle.name, sizeof address.sun_path - 2);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(handle.name));
}

void send_message(int fd, const Message& message, const std::vector<int>& fds) {
  iovec part{const_cast<Message*>(&message), sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxSegments)] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(rights), fds.data(), sizeof(int) * fds.size());
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(fd, &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(sizeof message)) fail_with_errno("a message could not be sent");
}

void await_input(int fd, double timeout_s, const char* what) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (std::chrono::steady_clock::now() < end) {
    pollfd poller{fd, POLLIN, 0};
    const int ready = poll(&poller, 1, 100);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail_with_errno("poll");
  }
  fail(std::string(what) + " did not come within " + std::to_string(timeout_s) + " s");
}

Mesh::Received receive_message(int fd, double timeout_s) {
  await_input(fd, timeout_s, "a message of a peer");
  Mesh::Received received;
  iovec part{&received.message, sizeof received.message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxSegments)];
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t got = 0;
  do {
    got = recvmsg(fd, &header, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  for (cmsghdr* each = CMSG_FIRSTHDR(&header); got > 0 && each != nullptr; each = CMSG_NXTHDR(&header, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    received.fds.resize((each->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(received.fds.data(), CMSG_DATA(each), received.fds.size() * sizeof(int));
  }
  if (got != static_cast<ssize_t>(sizeof received.message)) fail("a peer has closed its socket");
  return received;
}

}  // namespace

Listener::Listener() {
  static std::atomic<int> count{0};
  std::random_device device;
  const std::string name = "nccl_ep_gin_loopback_" + std::to_string(getpid()) + "_" + std::to_string(count++) + "_" +
                           std::to_string(device());
  std::strncpy(handle_.name, name.c_str(), sizeof handle_.name - 1);
  fd_ = new_socket();
  sockaddr_un address;
  const socklen_t length = address_of(handle_, address);
  if (bind(fd_, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd_, 64) != 0) {
    close(fd_);
    fail_with_errno("a socket to listen on");
  }
}

Listener::~Listener() { close(fd_); }

Mesh::Mesh(const std::vector<Handle>& handles, int rank, const Listener& listener, double timeout_s)
    : rank_(rank), timeout_s_(timeout_s), sockets_(handles.size(), -1) {
  const int num_ranks = static_cast<int>(handles.size());
  Message hello;
  hello.rank = static_cast<uint32_t>(rank);
  for (int peer = 0; peer < rank; peer++) {
    if (std::memcmp(handles[peer].magic, Handle{}.magic, sizeof Handle{}.magic) != 0) {
      fail("the handle of rank " + std::to_string(peer) + " is not of this plugin");
    }
    sockets_[peer] = new_socket();
    sockaddr_un address;
    const socklen_t length = address_of(handles[peer], address);
    if (connect(sockets_[peer], reinterpret_cast<sockaddr*>(&address), length) != 0) {
      fail_with_errno("no connection to rank " + std::to_string(peer) + ", which must run on this host");
    }
    send_message(sockets_[peer], hello, {});
  }
  for (int others = rank + 1; others < num_ranks; others++) {
    await_input(listener.fd(), timeout_s, "a connection of a peer");
    const int fd = accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) fail_with_errno("accept");
    const Received received = receive_message(fd, timeout_s);
    const auto peer = static_cast<int>(received.message.rank);
    if (received.message.kind != Message::kHello || peer <= rank || peer >= num_ranks || sockets_[peer] >= 0) {
      close(fd);
      fail("a stranger has connected");
    }
    sockets_[peer] = fd;
  }
}

Mesh::~Mesh() {
  for (int fd : sockets_) {
    if (fd >= 0) close(fd);
  }
}

std::vector<Mesh::Received> Mesh::exchange(Message mine, const std::vector<int>& fds) {
  mine.rank = static_cast<uint32_t>(rank_);
  std::vector<Received> all(sockets_.size());
  all[rank_].message = mine;
  for (int fd : sockets_) {
    if (fd >= 0) send_message(fd, mine, fds);
  }
  for (size_t peer = 0; peer < sockets_.size(); peer++) {
    if (sockets_[peer] < 0) continue;
    all[peer] = receive_message(sockets_[peer], timeout_s_);
    const Message& theirs = all[peer].message;
    if (theirs.kind != mine.kind || theirs.number != mine.number) {
      fail("rank " + std::to_string(peer) + " is at step " + std::to_string(theirs.kind) + "." +
           std::to_string(theirs.number) + ", this rank at " + std::to_string(mine.kind) + "." +
           std::to_string(mine.number) + ": registrations must be in the same order on all ranks");
    }
  }
  return all;
}

bool Mesh::has_gone(int rank) const {
  pollfd poller{sockets_[rank], POLLRDHUP, 0};
  return poll(&poller, 1, 0) > 0 && (poller.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace gin_loopback
