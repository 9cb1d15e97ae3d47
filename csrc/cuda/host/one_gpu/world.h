// A world on one GPU (cuda/host/one_gpu_world.h), in the library of its kernels.
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

#include "base/check.h"
#include "cuda/host/one_gpu_world.h"

namespace ep {

class World : public OneGpuWorld {
 public:
  // As join_one_gpu_world().
  static std::shared_ptr<OneGpuWorld> join(Bootstrap& bootstrap, uint64_t window_bytes, double timeout_seconds,
                                           bool masks_ranks);
  ~World() override;
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  LsaPeers peers(int rank) const override { return {windows_, stride_, rank}; }

  void run(int rank, const KernelArgs<LlDispatchParams>& args, void* stream) override;
  void run(int rank, const KernelArgs<LlCombineParams>& args, void* stream) override;
  void run(int rank, const KernelArgs<LlCombineWeightsParams>& args, void* stream) override;
  void run(int rank, const KernelArgs<HtRouteParams>& args, void* stream) override;
  void run(int rank, const KernelArgs<HtDispatchParams>& args, void* stream) override;
  void run(int rank, const KernelArgs<HtCombineParams>& args, void* stream) override;

  // Launches the kernel of all ranks: `args` is a device array of theirs, `host_args` its host copy.
  using Launch = void (*)(const void* host_args, const void* args, int num_ranks, void* stream);
  struct Call {
    const char* name = nullptr;
    Launch launch = nullptr;
    size_t bytes = 0;  // of a rank's arguments
    void* stream = nullptr;
  };
  void run(int rank, const Call& call, const void* args);

  std::unique_ptr<NetworkPath> make_network_path(Bootstrap& bootstrap, const NetworkConfig& config) override;

  void set_timeout(double seconds) override;
  void abort(int rank) override;

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

  World(int num_ranks, uint64_t window_bytes, double timeout_seconds);
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
