#include "cuda/host/gpu_recording.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cuda/ht/observed_counts.h"
#include "runtime/gpu_clock.h"
#include "transport/device/device_guard.h"

namespace ep {
namespace {

constexpr int kAtATime = 256;  // entries in one piece of page-locked memory
constexpr int kLooks = 3;      // at a GPU's clock; the first launch takes longer
constexpr int64_t kLookNs = 100 * 1000;

using Word = RecordedWords::Word;

struct Words : GpuRecording::Entry {
  RecordedWords recorded;
  int max_counts = 0;
  // What is awaited before it is done: that an operation began, that it ended, its counts.
  bool has_begin = false, has_ends = false;
  int num_counts = 0;
  bool has_own_counts = false;  // which are there when it has ended, or will never be
  bool is_lost = false;         // kernels may write into it at any time

  Words(uint64_t* words, int most) : max_counts(most) { recorded.words = words; }
  uint64_t& word(int i) const { return recorded.words[i]; }
};

// A GPU by its number, or, of the emulator, that of the thread.
class OnGpu {
 public:
  explicit OnGpu(int device) {
    if (device >= 0) guard_.emplace(device);
  }

 private:
  std::optional<DeviceGuard> guard_;
};

uint64_t seen(uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

class Recording final : public GpuRecording {
 public:
  explicit Recording(int device) : device_(device) {
    const OnGpu on_gpu(device_);
    int sms = 0;
    EP_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, std::max(device_, 0)));
    EP_CHECK(sms <= RecordedWords::kMostBlocks, "recordings are for GPUs of up to ", RecordedWords::kMostBlocks,
             " SMs, this one has ", sms);
    EP_CUDA(cudaStreamCreateWithFlags(&idle_, cudaStreamNonBlocking));
    try {
      look_first();
    } catch (const Error&) {
      free_all();
      throw;
    }
  }
  ~Recording() override {
    try {
      const OnGpu on_gpu(device_);
      free_all();
    } catch (const Error&) {
    }
  }

  Entry* begin(const Observation& operation) override {
    const OnGpu on_gpu(device_);
    const int most = operation.shape.num_ranks + operation.shape.num_experts;
    Words* entry = free_entry(most);
    while (entry == nullptr) {
      add_entries(most);
      entry = free_entry(most);
    }
    std::fill_n(&entry->word(Word::kEnds), entry->word(Word::kBlocks), 0);
    entry->word(Word::kBegin) = entry->word(Word::kBlocks) = 0;
    entry->recorded.tag = ++tags_;
    entry->num_counts = 0;
    entry->has_ends = false;
    entry->has_begin = !operation.has_own_times;
    entry->has_own_counts = operation.has_own_counts;
    if (operation.has_own_times) return entry;
    try {
      launch_observed_time(&entry->word(Word::kBegin), operation.stream);
    } catch (const Error&) {
      give_back(*entry);
      throw;
    }
    return entry;
  }

  RecordedWords words_of(const Entry& given) override { return static_cast<const Words&>(given).recorded; }

  void end(Entry& given, const Observation& operation, bool has_rows, bool has_choices) override {
    Words& entry = static_cast<Words&>(given);
    entry.has_begin = entry.has_ends = true;
    ObservedCounts counts{.ids = operation.ids,
                          .is_idx64 = operation.is_idx64,
                          .num_tokens = operation.num_tokens,
                          .shape = operation.shape,
                          .has_row_per_choice = operation.has_row_per_choice,
                          .has_choices = has_choices,
                          .rows = operation.rows,
                          .has_rows = has_rows,
                          .recorded = entry.recorded,
                          .has_time = !operation.has_own_times};
    if (!operation.has_own_counts) counts.has_rows = has_rows && counts.can_be_counted();
    entry.num_counts = counts.num_words();
    if (operation.has_own_counts || (operation.has_own_times && !counts.has_rows)) return;
    const OnGpu on_gpu(device_);
    if (!operation.has_own_times) entry.word(Word::kBlocks) = 1;  // that of the kernel behind it
    launch_observed_counts(counts, operation.stream);
  }

  void fail(Entry& given, const Observation& operation) override {
    Words& entry = static_cast<Words&>(given);
    const OnGpu on_gpu(device_);
    entry.is_lost =
        operation.has_own_times && cudaStreamQuery(static_cast<cudaStream_t>(operation.stream)) != cudaSuccess;
    cudaGetLastError();
    if (entry.is_lost) has_lost_ = true;
  }

  void give_back(Entry& given) override {
    Words& entry = static_cast<Words&>(given);
    const std::lock_guard lock(mutex_);
    if (entry.max_counts >= max_counts_ && !entry.is_lost) free_.push_back(&entry);
  }

  bool is_done(const Entry& given) override {
    const Words& entry = static_cast<const Words&>(given);
    if (entry.has_begin && seen(entry.word(Word::kBegin)) == 0) return false;
    if (!entry.has_ends) return true;
    const auto blocks = static_cast<int>(seen(entry.word(Word::kBlocks)));
    if (blocks == 0) return false;
    for (int i = 0; i < blocks; i++) {
      if (seen(entry.word(Word::kEnds + i)) == 0) return false;
    }
    return entry.has_own_counts || has_counts(entry);
  }
  void wait(const Entry& entry) override {
    while (!is_done(entry)) {
      check_gpu();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  Times times(const Entry& given) override {
    const Words& entry = static_cast<const Words&>(given);
    const uint64_t *ends = &entry.word(Word::kEnds), begin = entry.word(Word::kBegin);
    const uint64_t end = *std::max_element(ends, ends + entry.word(Word::kBlocks));
    look_again();
    return {clock_.on_host(begin), std::max<int64_t>(static_cast<int64_t>(end - begin), 0)};
  }
  const uint64_t* counts(const Entry& given) override {
    const Words& entry = static_cast<const Words&>(given);
    return entry.num_counts > 0 && has_counts(entry) ? &entry.word(Word::kCounts) : nullptr;
  }

 private:
  static bool has_counts(const Words& entry) {
    for (int i = 0; i < entry.num_counts; i++) {
      if (!entry.recorded.is_count(seen(entry.word(Word::kCounts + i)))) return false;
    }
    return true;
  }

  // The GPU's clock is read by a kernel on an idle stream: no caller's stream is waited for.
  void look_first() {
    clock_word_ = page_locked(1);
    clock_.begin_look(host_clock_ns());
    for (int i = 0; i < kLooks; i++) {
      launch_look();
      while (seen(*clock_word_) == 0) check_gpu();
      clock_.add(*clock_word_, host_clock_ns());
    }
    clock_.end_look();
  }
  // By the thread that asks for times. Where the GPU has no room for the kernel, it is not waited for long.
  void look_again() {
    if (!clock_.is_due(host_clock_ns()) || seen(*clock_word_) == 0) return;
    try {
      const OnGpu on_gpu(device_);
      clock_.begin_look(host_clock_ns());
      for (int i = 0; i < kLooks; i++) {
        launch_look();
        const int64_t latest_ns = host_clock_ns() + kLookNs;
        while (seen(*clock_word_) == 0) {
          if (host_clock_ns() > latest_ns) return;
        }
        clock_.add(*clock_word_, host_clock_ns());
      }
      clock_.end_look();
    } catch (const Error&) {  // told by others: this operation is done
    }
  }
  void launch_look() {
    std::atomic_ref(*clock_word_).store(0, std::memory_order_relaxed);
    launch_observed_time(clock_word_, idle_);
  }
  void check_gpu() const {
    const OnGpu on_gpu(device_);
    const cudaError_t state = cudaStreamQuery(idle_);
    if (state == cudaErrorNotReady) {
      cudaGetLastError();
    } else {
      EP_CUDA(state);
    }
  }

  // Calls of CUDA are made without the mutex: one that waits for room in a stream must not keep the thread waiting
  // whose operation makes that room.
  Words* free_entry(int num_counts) {
    const std::lock_guard lock(mutex_);
    if (free_.empty() || max_counts_ < num_counts) return nullptr;
    Words* entry = free_.back();
    free_.pop_back();
    return entry;
  }
  // For many operations at once, of the size of the largest so far: the GPU may have to rest for it. Smaller entries
  // are not used again.
  void add_entries(int num_counts) {
    int each = 0;
    {
      const std::lock_guard lock(mutex_);
      each = std::max(num_counts, max_counts_);
    }
    const size_t stride = static_cast<size_t>(Word::kCounts + each);
    uint64_t* words = page_locked(stride * kAtATime);
    const std::lock_guard lock(mutex_);
    if (each < max_counts_) return;  // another thread was here with larger ones
    if (each > max_counts_) free_.clear();
    max_counts_ = each;
    for (int i = 0; i < kAtATime; i++) {
      free_.push_back(&entries_.emplace_back(words + stride * static_cast<size_t>(i), each));
    }
  }
  uint64_t* page_locked(size_t count) {
    uint64_t* words = nullptr;
    EP_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&words), count * sizeof *words, cudaHostAllocMapped));
    std::fill_n(words, count, 0);
    const std::lock_guard lock(mutex_);
    pieces_.push_back(words);
    return words;
  }
  // At the end of a process, or of a GPU that has failed, errors mean nothing.
  void free_all() {
    for (uint64_t* piece : pieces_) {
      if (!has_lost_) cudaFreeHost(piece);
    }
    cudaStreamDestroy(idle_);
    cudaGetLastError();
  }

  const int device_;
  cudaStream_t idle_ = nullptr;  // also tells of errors
  GpuClock clock_;
  uint64_t* clock_word_ = nullptr;  // page-locked; 0: the kernel that writes it has not run
  std::atomic<uint32_t> tags_{0};
  std::atomic<bool> has_lost_{false};  // entries that kernels may still write into
  std::mutex mutex_;                   // of what follows
  std::vector<uint64_t*> pieces_;
  std::deque<Words> entries_;
  std::vector<Words*> free_;
  int max_counts_ = 0;  // of each of free_
};

}  // namespace

std::unique_ptr<GpuRecording> make_gpu_recording(int device) { return std::make_unique<Recording>(device); }

bool is_capturing_stream(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t state = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (state != cudaSuccess) cudaGetLastError();  // of the default stream beside a capture
  return state != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

}  // namespace ep
