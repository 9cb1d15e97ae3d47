#include "transport/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>

#include "base/check.h"
#include "base/interruption.h"

namespace ep {
namespace {

uint64_t random_word(std::random_device& random) { return static_cast<uint64_t>(random()) << 32 | random(); }

}  // namespace

Token random_token() {
  std::random_device random;
  return {{random_word(random), random_word(random)}};
}

std::string hex_of(const Token& token) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(token.words[0]),
                static_cast<unsigned long long>(token.words[1]));
  return text;
}

ProcessIdentity own_process() {
  static const uint64_t number = random_token().words[0];
  return {getpid(), number};
}

ProcessWatch::ProcessWatch(const ProcessIdentity& process) : process_(process) {
  if (process == own_process()) return;  // ranks that are threads watch one another: a descriptor for each pair
  pidfd_ = File(static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0)));
  if (pidfd_.fd() >= 0) return;
  raise(ErrorKind::kSystem, "pidfd_open of process ", process.pid, ": ", std::strerror(errno),
        " (it must not have ended, and ranks must share a process namespace)");
}

bool ProcessWatch::has_ended_within(double seconds) const {
  if (pidfd_.fd() < 0) return true;
  constexpr int kLookMilliseconds = 20;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (true) {
    pollfd end{pidfd_.fd(), POLLIN, 0};
    if (poll(&end, 1, kLookMilliseconds) > 0) return true;
    if (has_interruption()) throw Interrupted(concat("to see the end of process ", process_.pid));
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

}  // namespace ep
