// A world of ranks that are threads of the test, without torch.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/check.h"
#include "cpu/backend.h"
#include "runtime/group.h"
#include "transport/transport.h"

namespace ep {

// Sanitizers slow the protocol down by about this much; loops of many rounds are shortened by it.
#if defined(__SANITIZE_THREAD__)
constexpr bool kHasTsan = true;
constexpr int kSlowdown = 4;
#elif defined(__SANITIZE_ADDRESS__)
constexpr bool kHasTsan = false;
constexpr int kSlowdown = 2;
#else
constexpr bool kHasTsan = false;
constexpr int kSlowdown = 1;
#endif

inline void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

// Where the ranks of one process meet. A rank that fails says so, so that the others do not wait for it.
class Meeting {
 public:
  Meeting(int num_ranks, double deadline_seconds)
      : mine_(num_ranks),
        deadline_(
            std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(deadline_seconds))) {}

  int num_ranks() const { return static_cast<int>(mine_.size()); }

  std::vector<std::string> allgather(int rank, std::string_view bytes) {
    std::unique_lock lock(mutex_);
    mine_[rank] = bytes;
    const int meeting = num_meetings_;
    if (++num_present_ == num_ranks()) {
      all_ = mine_;
      num_present_ = 0;
      num_meetings_++;
      changed_.notify_all();
      return all_;
    }
    const bool in_time = changed_.wait_for(lock, deadline_, [&] { return num_meetings_ != meeting || !left_.empty(); });
    // Nobody can begin to overwrite all_ before this rank has come to the next meeting.
    if (num_meetings_ != meeting) return all_;
    raise(ErrorKind::kTimeout, "rank ", rank, " met nobody: ", in_time ? left_ : "the deadline has passed");
  }
  void leave(int rank) {
    std::lock_guard lock(mutex_);
    left_ = concat("rank ", rank, " has left");
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> mine_, all_;
  std::string left_;
  int num_present_ = 0;
  int num_meetings_ = 0;
  const std::chrono::milliseconds deadline_;
};

class ThreadBootstrap : public Bootstrap {
 public:
  ThreadBootstrap(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}
  int rank() const override { return rank_; }
  int num_ranks() const override { return meeting_.num_ranks(); }
  std::vector<std::string> allgather(std::string_view mine) override { return meeting_.allgather(rank_, mine); }

 private:
  Meeting& meeting_;
  const int rank_;
};

// Runs `body` once a rank, on a thread each. Returns what each rank threw, "" for nothing.
inline std::vector<std::string> run_ranks(int num_ranks, const std::function<void(Bootstrap&)>& body,
                                          double deadline_seconds = 60) {
  Meeting meeting(num_ranks, deadline_seconds);
  std::vector<std::string> problems(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; rank++) {
    threads.emplace_back([&, rank] {
      ThreadBootstrap bootstrap(meeting, rank);
      try {
        body(bootstrap);
      } catch (const std::exception& error) {
        problems[rank] = concat("rank ", rank, ": ", error.what());
        meeting.leave(rank);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return problems;
}

// The lines of all ranks that failed; "" if none did.
inline std::string joined(const std::vector<std::string>& problems) {
  std::string text;
  for (const std::string& problem : problems) {
    if (!problem.empty()) text += problem + "\n";
  }
  return text;
}

inline std::unique_ptr<Group> make_cpu_group(Bootstrap& bootstrap, const GroupConfig& config) {
  return std::make_unique<Group>(bootstrap, config, &make_cpu_backend);
}

// A seeded hash: tests draw from it where every rank must draw alike without talking.
inline uint64_t hash_of(std::initializer_list<uint64_t> parts) {
  uint64_t hash = 0x243F6A8885A308D3ull;
  for (uint64_t part : parts) {
    hash = (hash ^ part) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  hash *= 0xD6E8FEB86659FD93ull;
  return hash ^ hash >> 32;
}

}  // namespace ep
