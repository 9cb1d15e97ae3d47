#include "base/fork.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "runtime/arena.h"

namespace ep {
namespace {

constexpr int kForks = 100;
constexpr unsigned kPatience = 60;  // seconds, after which a fork that hangs is ended by a signal

// How a fork of this process ended that did this.
template <class Body>
int status_of_fork(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kPatience);
    body();
    _exit(0);  // the test framework belongs to the parent
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

// Beside a thread that does this without a pause.
template <class Work, class Body>
void fork_beside(Work work, Body body) {
  std::atomic<bool> is_over = false;
  std::thread thread([&] {
    while (!is_over) work();
  });
  for (int i = 0; i < kForks; i++) EXPECT_EQ(status_of_fork(body), 0);
  is_over = true;
  thread.join();
}

struct Owner {};

TEST(Fork, FindsTheMutexesOfTheProcessFree) {
  auto& mutex = process_mutex<Owner, std::mutex>();
  fork_beside([&] { std::lock_guard lock(mutex); }, [&] { std::lock_guard lock(mutex); });
  auto& shared = process_mutex<Owner, std::shared_mutex>();
  fork_beside([&] { std::shared_lock lock(shared); }, [&] { std::unique_lock lock(shared); });
  fork_beside([&] { std::unique_lock lock(shared); }, [&] { std::shared_lock lock(shared); });
}

TEST(Fork, IsCounted) {
  const int before = num_forks();
  EXPECT_EQ(status_of_fork([&] {
              if (num_forks() != before + 1) _exit(1);
              const int status = status_of_fork([&] {
                if (num_forks() != before + 2) _exit(1);
              });
              if (status != 0) _exit(2);
            }),
            0);
  EXPECT_EQ(num_forks(), before);
}

TEST(Fork, LetsGoOfWhatLiesInTheArenaOfItsParent) {
  char memory[4096];
  const auto arena = std::make_shared<Arena>(memory, 0, sizeof memory, nullptr);
  auto extent = Arena::take(arena, 512);
  fork_beside([&] { Arena::take(arena, 512); }, [&] { extent.reset(); });
  extent.reset();
  EXPECT_EQ(arena->free_bytes(), sizeof memory);
}

}  // namespace
}  // namespace ep
