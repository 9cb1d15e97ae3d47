// Processes of one machine that gather bytes from one another, through memory that they share under a name.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

constexpr int kMostRanks = 16, kChunk = 4096;

struct Meeting {
  std::atomic<int> present;
  std::atomic<unsigned> round;
  char mine[kMostRanks][kChunk];
};

struct Member {
  using Time = std::chrono::steady_clock::time_point;

  Meeting* meeting;
  int rank, num_ranks;

  // Null where the others do not come.
  static Member* join(const char* name, int rank, int num_ranks) {
    const int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (num_ranks > kMostRanks || file < 0 || ftruncate(file, sizeof(Meeting)) != 0) return nullptr;
    void* memory = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return nullptr;
    auto* member = new Member{static_cast<Meeting*>(memory), rank, num_ranks};  // lives as long as the process
    if (!member->meet(std::chrono::steady_clock::now() + std::chrono::seconds(60))) return nullptr;
    shm_unlink(name);
    return member;
  }

  bool meet(Time end) {
    const unsigned round = meeting->round;
    if (meeting->present.fetch_add(1) + 1 == num_ranks) {
      meeting->present = 0;
      meeting->round++;
      return true;
    }
    while (meeting->round == round) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

  // all: of each rank, one behind the other.
  bool gather(const void* own, void* all, size_t bytes, Time end) {
    for (size_t at = 0; at < bytes; at += kChunk) {
      const size_t size = bytes - at < kChunk ? bytes - at : kChunk;
      std::memcpy(meeting->mine[rank], static_cast<const char*>(own) + at, size);
      if (!meet(end)) return false;
      for (int r = 0; r < num_ranks; r++) {
        std::memcpy(static_cast<char*>(all) + r * bytes + at, meeting->mine[r], size);
      }
      if (!meet(end)) return false;
    }
    return true;
  }
};
