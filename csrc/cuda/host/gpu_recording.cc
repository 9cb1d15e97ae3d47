#include "cuda/host/gpu_recording.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "transport/device/device_guard.h"

namespace ep {

struct GpuRecording::Entry {
  cudaEvent_t begin = nullptr, end = nullptr;
  uint64_t* words = nullptr;  // of `capacity`
  int capacity = 0;
  int num_words = 0;  // that its kernel writes
  uint32_t tag = 0;
};

namespace {

constexpr int kAtATime = 256;  // entries, and blocks of words

using Entry = GpuRecording::Entry;

// A GPU by its number, or, of the emulator, that of the thread.
class OnGpu {
 public:
  explicit OnGpu(int device) {
    if (device >= 0) guard_.emplace(device);
  }

 private:
  std::optional<DeviceGuard> guard_;
};

cudaEvent_t timing_event() {
  cudaEvent_t made = nullptr;
  EP_CUDA(cudaEventCreateWithFlags(&made, cudaEventDefault));
  return made;
}

class Recording final : public GpuRecording {
 public:
  explicit Recording(int device) : device_(device) {
    const OnGpu on_gpu(device_);
    // An event on an idle stream brings the GPU's clock onto the host's. No caller's stream is waited for.
    cudaStream_t idle = nullptr;
    EP_CUDA(cudaStreamCreateWithFlags(&idle, cudaStreamNonBlocking));
    last_ = timing_event();
    EP_CUDA(cudaEventRecord(last_, idle));
    EP_CUDA(cudaEventSynchronize(last_));
    last_ns_ = static_cast<double>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
    EP_CUDA(cudaStreamDestroy(idle));
    add_entries();
  }
  // At the end of a process, or of a GPU that has failed, errors mean nothing.
  ~Recording() override {
    try {
      const OnGpu on_gpu(device_);
      cudaEventDestroy(last_);
      for (Entry& entry : entries_) {
        cudaEventDestroy(entry.begin);
        cudaEventDestroy(entry.end);
      }
      for (uint64_t* block : blocks_) cudaFreeHost(block);
      cudaGetLastError();
    } catch (const Error&) {
    }
  }

  Entry* begin(void* stream) override {
    const OnGpu on_gpu(device_);
    Entry* entry = free_entry();
    if (entry == nullptr) {
      add_entries();
      entry = free_entry();
    }
    EP_CHECK_USAGE(entry != nullptr, "more operations at once than a recording has room for");
    try {
      record(entry->begin, stream);
    } catch (const Error&) {
      give_back(entry);
      throw;
    }
    return entry;
  }

  void end(Entry& entry, const ObservedCounts* counts, void* stream) override {
    const OnGpu on_gpu(device_);
    record(entry.end, stream);
    entry.num_words = 0;
    if (counts == nullptr || !counts->can_be_counted()) return;
    give_words(entry, counts->num_words());
    entry.tag = ++tags_;
    entry.num_words = counts->num_words();
    ObservedCounts wanted = *counts;
    wanted.out = entry.words;
    wanted.tag = entry.tag;
    launch_observed_counts(wanted, stream);
  }

  void give_back(Entry* entry) override {
    const std::lock_guard lock(mutex_);
    free_.push_back(entry);
  }

  bool is_done(const Entry& entry) override { return has_ended(entry) && has_words(entry); }
  void wait(const Entry& entry) override {
    while (!is_done(entry)) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  Times take_times(Entry& entry) override {
    const OnGpu on_gpu(device_);
    float since_last = 0, between = 0;
    EP_CUDA(cudaEventElapsedTime(&since_last, last_, entry.begin));
    EP_CUDA(cudaEventElapsedTime(&between, entry.begin, entry.end));
    last_ns_ += since_last * 1e6;
    std::swap(last_, entry.begin);  // which is recorded anew
    return {static_cast<int64_t>(last_ns_), between * 1e3};
  }
  const uint64_t* words(const Entry& entry) override { return entry.num_words > 0 ? entry.words : nullptr; }

 private:
  static void record(cudaEvent_t event, void* stream) {
    EP_CUDA(cudaEventRecord(event, static_cast<cudaStream_t>(stream)));
  }
  bool has_ended(const Entry& entry) const {
    const OnGpu on_gpu(device_);
    const cudaError_t state = cudaEventQuery(entry.end);
    if (state != cudaErrorNotReady) EP_CUDA(state);
    if (state == cudaErrorNotReady) cudaGetLastError();
    return state == cudaSuccess;
  }
  // Those of its kernel, which is behind its end: each says by itself that it is there.
  static bool has_words(const Entry& entry) {
    for (int i = 0; i < entry.num_words; i++) {
      const uint64_t word = std::atomic_ref(entry.words[i]).load(std::memory_order_acquire);
      if (static_cast<uint32_t>(word >> 32) != entry.tag) return false;
    }
    return true;
  }

  // Calls of CUDA are made without the mutex: one that waits for room in a stream must not keep the thread waiting
  // whose operation makes that room.
  Entry* free_entry() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return nullptr;
    Entry* entry = free_.front();  // the one that has rested longest
    free_.pop_front();
    return entry;
  }
  void add_entries() {
    std::vector<Entry> made(kAtATime);
    for (Entry& entry : made) {
      entry.begin = timing_event();
      entry.end = timing_event();
    }
    const std::lock_guard lock(mutex_);
    for (Entry& entry : made) free_.push_back(&entries_.emplace_back(entry));
  }
  // Page-locked memory takes the GPU's attention: it is made for many entries, of the size of the largest so far.
  void give_words(Entry& entry, int num_words) {
    if (entry.capacity >= num_words) return;
    if (take_words(entry, num_words)) return;
    int each = 0;
    {
      const std::lock_guard lock(mutex_);
      each = std::max(num_words, capacity_);
    }
    uint64_t* block = nullptr;
    const size_t count = static_cast<size_t>(each) * kAtATime;
    EP_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&block), count * sizeof *block, cudaHostAllocMapped));
    std::fill_n(block, count, 0);
    {
      const std::lock_guard lock(mutex_);
      blocks_.push_back(block);
      if (each > capacity_) unused_.clear();  // of smaller ones, which stay until the end
      capacity_ = std::max(each, capacity_);
      if (each == capacity_) {
        for (int i = 1; i < kAtATime; i++) unused_.push_back(block + static_cast<size_t>(i) * each);
      }
    }
    entry.words = block;
    entry.capacity = each;
  }
  bool take_words(Entry& entry, int num_words) {
    const std::lock_guard lock(mutex_);
    if (unused_.empty() || capacity_ < num_words) return false;
    entry.words = unused_.back();
    entry.capacity = capacity_;
    unused_.pop_back();
    return true;
  }

  const int device_;
  cudaEvent_t last_ = nullptr;  // whose time is known
  double last_ns_ = 0;
  std::atomic<uint32_t> tags_{0};
  std::mutex mutex_;  // of what follows
  std::deque<Entry> entries_;
  std::deque<Entry*> free_;
  std::vector<uint64_t*> blocks_, unused_;
  int capacity_ = 0;  // of each of unused_
};

}  // namespace

std::unique_ptr<GpuRecording> GpuRecording::make(int device) { return std::make_unique<Recording>(device); }

bool GpuRecording::is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t state = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (state != cudaSuccess) cudaGetLastError();  // of the default stream beside a capture
  return state != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

}  // namespace ep
