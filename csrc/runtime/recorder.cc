#include "runtime/recorder.h"

#include <utility>

namespace ep {

void* Recorder::begin(const Observation& seen) noexcept {
  if (is_forked()) return nullptr;
  auto begun = std::make_unique<Begun>();
  if (is_on_gpu(seen)) begin_on_gpu(seen, *begun);
  begun->ns = host_clock_ns();
  return begun.release();
}

RecordedWords Recorder::words_of(void* given) noexcept {
  const auto* begun = static_cast<const Begun*>(given);
  return begun != nullptr && begun->entry != nullptr ? begun->gpu->words_of(*begun->entry) : RecordedWords();
}

void Recorder::end(const Observation& seen, void* given, bool has_failed) noexcept {
  const int64_t end_ns = host_clock_ns();
  const std::unique_ptr<Begun> begun(static_cast<Begun*>(given));
  if (begun == nullptr) return;
  auto line = std::make_unique<RecordedLine>(seen, begun->ns, end_ns, has_failed);
  if (is_on_gpu(seen)) return end_on_gpu(seen, *begun, std::move(line));
  if (line->can_have_rows()) line->count(seen);
  Lines lines;
  lines.push_back(std::move(line));
  give(lines);
}

std::shared_ptr<GpuRecording> Recorder::gpu_of(int device) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = recordings_.find(device); found != recordings_.end()) return found->second;
  }
  std::shared_ptr<GpuRecording> made = gpus_.make(device);
  const std::lock_guard lock(mutex_);
  return recordings_.emplace(device, std::move(made)).first->second;
}

void Recorder::begin_on_gpu(const Observation& seen, Begun& begun) noexcept {
  try {
    begun.is_captured = gpus_.is_capturing(seen.stream);
    if (begun.is_captured) return;
    begun.gpu = gpu_of(seen.device_index);
    begun.entry = begun.gpu->begin(seen);
  } catch (const std::exception& error) {
    lose(1, error.what());
  }
}

void Recorder::end_on_gpu(const Observation& seen, const Begun& begun, std::unique_ptr<RecordedLine> line) noexcept {
  if (begun.entry == nullptr && !begun.is_captured) return;  // begin has failed
  const bool is_recorded = begin_to_end();
  line->is_captured = begun.is_captured;
  OnGpu operation{std::move(line), begun.gpu, begun.entry};
  bool is_lost = false;
  try {
    if (begun.entry != nullptr && operation.line->has_failed) begun.gpu->fail(*begun.entry, seen);
    if (begun.entry != nullptr && !is_recorded) {
      begun.gpu->wait(*begun.entry);  // which goes
    } else if (begun.entry != nullptr && !operation.line->has_failed) {
      const RecordedLine& made = *operation.line;
      begun.gpu->end(*begun.entry, seen, made.can_have_rows(), made.has_choices() && seen.rows == nullptr);
    }
  } catch (const std::exception& error) {
    lose(1, error.what());
    is_lost = true;
  }
  if (!is_recorded) return;
  bool is_batch = false;
  {
    const std::lock_guard lock(mutex_);
    num_ending_--;
    if (!is_lost) ended_[seen.device_index].push_back(std::move(operation));
    is_batch = ++num_since_batch_ >= kBatch && !begun.is_captured;
  }
  changed_.notify_all();
  if (is_batch || seen.device_index < 0) give_what_is_done();
}

bool Recorder::begin_to_end() {
  const std::lock_guard lock(mutex_);
  if (!is_closed_) num_ending_++;
  return !is_closed_;
}

// One thread at a time: others leave theirs to it, or to the next batch.
void Recorder::give_what_is_done() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (is_giving_ || is_closed_) return;
    is_giving_ = true;
    num_since_batch_ = 0;
    take_ended();
  }
  const Lines lines = finished(false);
  if (!lines.empty()) give(lines);
  {
    const std::lock_guard lock(mutex_);
    is_giving_ = false;
  }
  changed_.notify_all();
}

Recorder::Lines Recorder::close() {
  {
    std::unique_lock lock(mutex_);
    is_closed_ = true;
    changed_.wait(lock, [this] { return !is_giving_ && num_ending_ == 0; });
    take_ended();
  }
  Lines lines = finished(true);
  std::map<int, std::shared_ptr<GpuRecording>> recordings;
  const std::lock_guard lock(mutex_);
  for (const auto& [device, rest] : taken_) lost_.operations += static_cast<int64_t>(rest.size());
  taken_.clear();
  recordings.swap(recordings_);
  return lines;
}

Recorder::Lost Recorder::lost() {
  const std::lock_guard lock(mutex_);
  return lost_;
}

// With the mutex.
void Recorder::take_ended() {
  for (auto& [device, operations] : ended_) {
    for (OnGpu& operation : operations) taken_[device].push_back(std::move(operation));
    operations.clear();
  }
}

// What a GPU has done, in order: one that is not done keeps those behind it.
Recorder::Lines Recorder::finished(bool waits) noexcept {
  Lines lines;
  for (auto& [device, operations] : taken_) {
    try {
      for (; !operations.empty(); operations.pop_front()) {
        OnGpu& operation = operations.front();
        RecordedLine& line = *operation.line;
        if (operation.entry != nullptr) {
          GpuRecording& gpu = *operation.gpu;
          if (waits) gpu.wait(*operation.entry);
          if (!waits && !gpu.is_done(*operation.entry)) break;
          if (!line.has_failed) {
            const GpuRecording::Times times = gpu.times(*operation.entry);
            line.has_times = line.device_index >= 0;
            line.device_begin_ns = times.begin_ns;
            line.device_ns = times.ns;
            if (const uint64_t* counts = gpu.counts(*operation.entry)) line.take(counts);
          }
          gpu.give_back(*operation.entry);
        }
        lines.push_back(std::move(operation.line));
      }
    } catch (const std::exception& error) {
      lose(0, error.what());
    }
  }
  return lines;
}

void Recorder::lose(int operations, const char* error) noexcept {
  const std::lock_guard lock(mutex_);
  lost_.operations += operations;
  if (lost_.error.empty()) lost_.error = error;
}

}  // namespace ep
