// All ranks of a world on one GPU: each rank is a thread, their windows lie side by side in one allocation, and a call
// of all ranks becomes one launch. Several launches could not do: tools such as compute-sanitizer run one kernel at a
// time, and each would wait for the others.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/launch/launch.h"
#include "transport/transport.h"

namespace ep {

class OneGpuWorld {
 public:
  // Collective between threads of one process, on the current device.
  static std::shared_ptr<OneGpuWorld> join(Bootstrap& bootstrap, uint64_t window_bytes, double timeout_seconds);
  // The device must be done with the windows.
  ~OneGpuWorld();
  OneGpuWorld(const OneGpuWorld&) = delete;
  OneGpuWorld& operator=(const OneGpuWorld&) = delete;

  LsaPeers peers(int rank) const { return {windows_, stride_, rank}; }

  // Launches the kernel of all ranks: `args` is a device array of theirs, `host_args` its host copy.
  using Launch = void (*)(const void* host_args, const void* args, int num_ranks, void* stream);
  struct Call {
    const char* name = nullptr;
    Launch launch = nullptr;
    size_t bytes = 0;  // of a rank's arguments
    void* stream = nullptr;
  };
  // Returns when all ranks have called with the same kind of operation and the same stream, and it was launched. What
  // goes wrong is thrown on every rank.
  void run(int rank, const Call& call, const void* args);
  template <class Params>
  void run(int rank, const KernelArgs<Params>& args, void* stream);

  void set_timeout(double seconds);
  // Ranks that wait for this one give up, now and later.
  void abort(int rank);

 private:
  // Thrown anew by every rank.
  struct Problem {
    ErrorKind kind;
    std::string text;
  };
  // Where the arguments of a launch lie until its kernel is done.
  struct Slot {
    void* host = nullptr;  // pinned
    void* device = nullptr;
    cudaEvent_t done = nullptr;
    bool was_used = false;
  };

  OneGpuWorld(int num_ranks, uint64_t window_bytes, double timeout_seconds);
  void check_call(int rank, const Call& op);
  void launch_all();
  Slot make_slot();
  Slot& free_slot();
  void free_memory();
  [[noreturn]] void break_up(ErrorKind kind, const std::string& text);
  std::string missing_ranks() const;

  const int num_ranks_;
  int device_ = 0;
  char* windows_ = nullptr;
  uint64_t stride_ = 0;

  std::mutex mutex_;  // of everything below
  std::condition_variable launched_;
  double timeout_seconds_;
  Call call_;                         // of the ranks that have arrived
  std::vector<std::byte> arguments_;  // [rank][call_.bytes]
  std::vector<bool> has_arrived_;
  int num_arrived_ = 0;
  uint64_t num_launches_ = 0;
  std::optional<Problem> launch_problem_;  // of the last launch
  std::optional<Problem> broken_;          // no call can succeed any more
  std::vector<Slot> slots_;                // used in turn
  std::vector<Slot> captured_;             // of graphs, which read them at every replay
};

}  // namespace ep
