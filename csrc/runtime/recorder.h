// The observer of nccl_ep.record: lines of finished operations, of the CPU one by one, of a GPU many at a time, in the
// order of their calls.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork.h"
#include "runtime/gpu_recording.h"
#include "runtime/observed.h"
#include "runtime/recorded_line.h"

namespace ep {

class Recorder : public Observer {
 public:
  static constexpr int kBatch = 64;  // operations on GPUs after which those that are done are given

  using Lines = std::vector<std::unique_ptr<RecordedLine>>;
  // Operations whose GPU has failed.
  struct Lost {
    int64_t operations = 0;
    std::string error;  // the first one
  };

  explicit Recorder(RecordedGpus gpus) : gpus_(std::move(gpus)) {}

  void* begin(const Observation& seen) noexcept override;
  RecordedWords words_of(void* begun) noexcept override;
  void end(const Observation& seen, void* begun, bool has_failed) noexcept override;

  // What is left, for which it waits. Operations that end later are not recorded.
  Lines close();
  Lost lost();
  bool is_forked() const { return num_forks() != forks_; }  // a fork's operations are not recorded

 protected:
  virtual void give(const Lines& lines) noexcept = 0;  // at least one

 private:
  struct Begun {
    int64_t ns = 0;
    bool is_captured = false;
    std::shared_ptr<GpuRecording> gpu;
    GpuRecording::Entry* entry = nullptr;
  };
  struct OnGpu {
    std::unique_ptr<RecordedLine> line;
    std::shared_ptr<GpuRecording> gpu;
    GpuRecording::Entry* entry;  // null: captured
  };

  bool is_on_gpu(const Observation& seen) const { return gpus_.make && (seen.device_index >= 0 || gpus_.are_cpus); }
  std::shared_ptr<GpuRecording> gpu_of(int device);
  void begin_on_gpu(const Observation& seen, Begun& begun) noexcept;
  void end_on_gpu(const Observation& seen, const Begun& begun, std::unique_ptr<RecordedLine> line) noexcept;
  bool begin_to_end();
  void give_what_is_done() noexcept;
  void take_ended();
  Lines finished(bool waits) noexcept;
  void lose(int operations, const char* error) noexcept;

  const RecordedGpus gpus_;
  const int forks_ = num_forks();
  // No GPU is called with it: a call that waits for room in a stream must not keep the thread waiting whose operation
  // makes that room.
  std::mutex mutex_;  // of all but taken_
  std::condition_variable changed_;
  std::map<int, std::shared_ptr<GpuRecording>> recordings_;  // by GPUs
  std::map<int, std::deque<OnGpu>> ended_;                   // in order
  std::map<int, std::deque<OnGpu>> taken_;                   // the next of them, of the thread that gives what is done
  int num_since_batch_ = 0, num_ending_ = 0;
  bool is_giving_ = false, is_closed_ = false;
  Lost lost_;
};

}  // namespace ep
