#include "endpoint.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>

namespace gin_loopback {
namespace {

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

void check_range(uint64_t region_bytes, uint64_t offset, uint64_t bytes, const char* what) {
  if (bytes <= region_bytes && offset <= region_bytes - bytes) return;
  throw std::invalid_argument(std::string(what) + ": bytes " + std::to_string(offset) + " to " +
                              std::to_string(offset + bytes) + " of a region of " + std::to_string(region_bytes));
}

// Has a lock that a busy thread would hardly let go of.
class Turn {
 public:
  Turn(std::mutex& mutex, std::atomic<int>& num_waiting) : num_waiting_(num_waiting) {
    num_waiting_++;
    lock_ = std::unique_lock(mutex);
  }
  ~Turn() {
    lock_.unlock();
    num_waiting_--;
  }

 private:
  std::atomic<int>& num_waiting_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace

Endpoint::Endpoint(const std::vector<Handle>& handles, int rank, const Listener& listener, const Options& options)
    : options_(options), rank_(rank), num_ranks_(static_cast<int>(handles.size())) {
  if (options_.connect_stall_s > 0 && options_.is_faulty(rank)) {
    std::this_thread::sleep_for(std::chrono::duration<double>(options_.connect_stall_s));
    throw std::runtime_error("a network that does not connect (GIN_LOOPBACK_CONNECT_STALL_S)");
  }
  if (num_ranks_ > kMaxRanks) throw std::runtime_error(std::to_string(num_ranks_) + " ranks, at most 64");
  mover_ = make_cuda_mover();
  if (mover_ == nullptr) mover_ = make_host_mover();
  mesh_ = std::make_unique<Mesh>(handles, rank, listener, options_.timeout_s);

  const int fd = memfd_create("gin_loopback", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(Mailbox::bytes(num_ranks_))) != 0) {
    throw std::runtime_error("no shared memory for a mailbox");
  }
  Message message;
  message.kind = Message::kMailbox;
  const auto received = mesh_->exchange(message, {fd});
  for (int peer = 0; peer < num_ranks_; peer++) {
    const int theirs = peer == rank_ ? fd : received[peer].fds.at(0);
    mailboxes_.push_back(map_mailbox(theirs));
    close(theirs);
    senders_.emplace_back(&mailboxes_[peer]->rings[rank_]);
    schedules_.emplace_back(options_.reorders, options_.delay_ns,
                            options_.seed * kMaxRanks * kMaxRanks + static_cast<uint64_t>(rank_ * kMaxRanks + peer));
  }
  for (int peer = 0; peer < num_ranks_; peer++) receivers_.emplace_back(&mailboxes_[rank_]->rings[peer]);
  next_batch_ = mover_->num_finished() + 1;
  message.kind = Message::kReady;
  mesh_->exchange(message, {});
  thread_ = std::thread([this] { serve(); });
}

Endpoint::~Endpoint() {
  mailboxes_[rank_]->is_closing = 1;
  const uint64_t end = now_ns() + 3'000'000'000;  // peers may still want data to be moved here
  for (int peer = 0; peer < num_ranks_; peer++) {
    while (mailboxes_[peer]->is_closing == 0 && !has_failed(peer) && now_ns() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  is_ending_ = true;
  thread_.join();
  write_statistics();
  regions_.clear();
  for (Mailbox* mailbox : mailboxes_) munmap(mailbox, Mailbox::bytes(num_ranks_));
}

Mailbox* Endpoint::map_mailbox(int fd) const {
  // Pages of zeros are a Mailbox.
  void* const memory =
      mmap(nullptr, Mailbox::bytes(num_ranks_), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("a mailbox cannot be mapped");
  return static_cast<Mailbox*>(memory);
}

Region* Endpoint::add(void* data, uint64_t bytes, int type, uint64_t flags) {
  const std::lock_guard registering(register_mutex_);
  auto region = std::make_unique<Region>();
  region->number = static_cast<uint32_t>(regions_.size());
  region->data = static_cast<char*>(data);
  region->type = type;
  region->flags = flags;
  Message message;
  message.kind = Message::kRegion;
  message.number = region->number;
  message.bytes = bytes;
  message.type = static_cast<uint32_t>(type);
  const std::string gpu = mover_->gpu();
  std::memcpy(message.gpu, gpu.data(), std::min(gpu.size(), sizeof message.gpu));
  const bool is_cuda = type == kCudaMemory, is_host_world = gpu.empty();
  std::vector<int> fds;
  if (is_cuda != is_host_world) fds = mover_->share(data, bytes, message);
  region->is_shared = message.num_segments > 0 || message.pid != 0;
  const auto received = mesh_->exchange(message, fds);
  for (int fd : fds) close(fd);
  {
    const Turn turn(serve_mutex_, num_waiting_);
    for (int peer = 0; peer < num_ranks_; peer++) {
      region->bytes.push_back(received[peer].message.bytes);
      region->imported.push_back(peer == rank_ ? std::make_unique<Imported>() : mover_->import(received[peer]));
    }
    Source& own = region->imported[rank_]->source;
    own.address = reinterpret_cast<uint64_t>(data);
    own.is_same_gpu = is_cuda;
    regions_.push_back(std::move(region));
  }
  message = {};
  message.kind = Message::kReady;
  message.number = regions_.size();
  mesh_->exchange(message, {});
  return regions_.back().get();
}

void Endpoint::remove(Region* region) {
  const std::lock_guard registering(register_mutex_);
  const Turn turn(serve_mutex_, num_waiting_);
  const uint64_t last = mover_->submit();
  next_batch_ = last + 1;
  const uint64_t end = now_ns() + 3'000'000'000;
  while (mover_->num_finished() < last && now_ns() < end) std::this_thread::yield();
  const char* const begin = region->data;
  std::erase_if(signals_, [&](const auto& entry) {  // the memory's next owner begins at 0
    const char* word = static_cast<const char*>(entry.first);
    return word >= begin && word < begin + region->bytes[rank_];
  });
  region->is_alive = false;
  region->imported.clear();
}

uint64_t Endpoint::post(const Put& put) {
  Request request;
  request.context = put.context;
  request.bytes = put.bytes;
  if (put.bytes > 0) {
    if (put.source == nullptr || put.destination == nullptr) throw std::invalid_argument("a put without a region");
    check_range(put.source->bytes[rank_], put.source_offset, put.bytes, "source");
    check_range(put.destination->bytes[put.target], put.destination_offset, put.bytes, "destination");
    request.is_inline = put.source->type == kHostMemory && put.bytes <= kInlineBytes;
    if (request.is_inline) std::memcpy(&request.inline_data, put.source->data + put.source_offset, put.bytes);
    request.source_region = put.source->number;
    request.source_offset = put.source_offset;
    request.destination_region = put.destination->number;
    request.destination_offset = put.destination_offset;
  }
  if (put.signal != nullptr) {
    check_range(put.signal->bytes[put.target], put.signal_offset, sizeof(uint64_t), "signal");
    if ((put.signal->flags & kNeverResetFlag) == 0 && put.signal->is_shared) {
      throw std::invalid_argument("signals that may be reset are not offered: they may be words of a window");
    }
    request.signal_region = put.signal->number;
    request.signal_offset = put.signal_offset;
    request.add = put.add;
    request.is_strong = put.is_strong;
  }
  const std::lock_guard lock(post_mutex_);
  if (options_.fails_after > 0 && options_.is_faulty(rank_) && ++num_posts_ >= options_.fails_after) {
    throw std::runtime_error("a request fails (GIN_LOOPBACK_FAIL_AFTER)");
  }
  Sender& sender = senders_[put.target];
  const uint64_t end = now_ns() + 10'000'000'000;
  while (!sender.has_room()) {
    if (now_ns() > end || has_failed(put.target)) throw std::runtime_error("a ring stays full");
  }
  return sender.post(request);
}

bool Endpoint::has_failed(int peer) const {
  return mailboxes_[rank_]->has_failed != 0 || mailboxes_[peer]->has_failed != 0 || (lost_peers_ >> peer & 1) != 0;
}

bool Endpoint::has_failed() const {
  for (int peer = 0; peer < num_ranks_; peer++) {
    if (has_failed(peer)) return true;
  }
  return false;
}

// ---- The thread

void Endpoint::serve() {
  constexpr uint64_t kLookNs = 20'000'000;
  uint64_t idle_since = now_ns(), looked_at = idle_since;
  try {
    mover_->use_in_this_thread();
    while (!is_ending_) {
      if (num_waiting_ != 0) {
        std::this_thread::yield();
        continue;
      }
      const uint64_t now = now_ns();
      bool is_busy = false;
      {
        const std::lock_guard lock(serve_mutex_);
        is_busy = take_requests(now);
        for (Schedule<Work>& schedule : schedules_) {
          if (schedule.is_empty()) continue;
          is_busy = true;
          schedule.run(
              now, [&](const Work& work) { land(work); }, [&](const Work& work) { end(work); });
        }
        if (has_work_to_submit_) {
          next_batch_ = mover_->submit() + 1;
          has_work_to_submit_ = false;
          statistics_.submits++;
        }
        is_busy |= finish();
      }
      if (is_busy) idle_since = now;
      if (now - looked_at > kLookNs) {
        looked_at = now;
        watch_peers();
      }
      if (now - idle_since > kLookNs) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

bool Endpoint::take_requests(uint64_t now) {
  constexpr int kMostAtOnce = 64;
  bool has_taken = false, has_staged = false;
  for (int source = 0; source < num_ranks_; source++) {
    Work work;
    for (int count = 0; count < kMostAtOnce; count++) {
      const bool has_stalled = options_.stalls_after >= 0 && options_.is_faulty(rank_) &&
                               statistics_.requests >= static_cast<uint64_t>(options_.stalls_after);
      work = {};
      if (has_stalled || !receivers_[source].take(work, work.number)) break;
      work.source = source;
      has_taken = true;
      statistics_.requests++;
      statistics_.bytes += work.bytes;
      if (options_.completes_early) {
        complete_early(work);
        has_staged |= work.number == 0;
      }
      schedules_[source].add(work, now);
    }
  }
  // Copies of one batch have no order, and what was staged is to be copied on.
  if (has_staged) next_batch_ = mover_->submit() + 1;
  return has_taken;
}

void Endpoint::complete_early(Work& work) {
  if (work.bytes > 0 && !work.is_inline) {
    work.staged = mover_->take_staging(work.bytes);
    if (work.staged == nullptr) return;  // an ordinary request
    mover_->copy(work.staged, source_of(work), work.bytes);
  }
  finishing_.push_back({next_batch_, work.source, work.number, false});
  work.number = 0;
  statistics_.completed_early++;
}

Region* Endpoint::region(uint32_t number) const {
  if (number < regions_.size() && regions_[number]->is_alive) return regions_[number].get();
  throw std::runtime_error("a request for region " + std::to_string(number) + ", which is not registered here");
}

Source Endpoint::source_of(const Work& work) const {
  Source source = region(work.source_region)->imported[work.source]->source;
  if (source.address == 0) throw std::runtime_error("the source's memory cannot be read here");
  source.address += work.source_offset;
  return source;
}

void Endpoint::land(const Work& work) {
  if (work.bytes == 0) return;
  has_work_to_submit_ = true;
  char* const to = region(work.destination_region)->data + work.destination_offset;
  if (work.is_inline) {
    mover_->copy_value(to, work.inline_data, static_cast<uint32_t>(work.bytes));
  } else if (work.staged != nullptr) {
    mover_->copy(to, Source{reinterpret_cast<uint64_t>(work.staged), 0, false}, work.bytes);
  } else {
    mover_->copy(to, source_of(work), work.bytes);
  }
}

void Endpoint::end(const Work& work) {
  has_work_to_submit_ = true;
  if (work.signal_region != kNoRegion) {
    char* const word = region(work.signal_region)->data + work.signal_offset;
    mover_->store(word, signals_[word] += work.add);
  }
  finishing_.push_back({next_batch_, work.source, work.number, work.staged != nullptr});
}

bool Endpoint::finish() {
  const uint64_t finished = mover_->num_finished();
  while (!finishing_.empty() && finishing_.front().batch <= finished) {
    const Finishing& each = finishing_.front();
    if (each.number != 0) receivers_[each.source].finish(each.number);
    if (each.gives_staging_back) mover_->give_staging_back();
    finishing_.pop_front();
  }
  return !finishing_.empty();
}

void Endpoint::watch_peers() {
  for (int peer = 0; peer < num_ranks_; peer++) {
    if (peer == rank_ || mailboxes_[peer]->is_closing != 0 || !mesh_->has_gone(peer)) continue;
    if ((lost_peers_.fetch_or(1ull << peer) >> peer & 1) == 0) {
      std::fprintf(stderr, "gin_loopback: rank %d has lost rank %d\n", rank_, peer);
    }
  }
}

void Endpoint::fail(const std::string& text) {
  mailboxes_[rank_]->has_failed = 1;
  std::fprintf(stderr, "gin_loopback: rank %d: %s\n", rank_, text.c_str());
}

void Endpoint::write_statistics() const {
  if (options_.statistics.empty()) return;
  uint64_t passed = 0;
  for (const auto& schedule : schedules_) passed += schedule.num_passed();
  char line[256];
  const int length = std::snprintf(
      line, sizeof line,
      "{\"rank\": %d, \"ranks\": %d, \"requests\": %lu, \"bytes\": %lu, \"submits\": %lu, \"passed\": %lu, "
      "\"completed_early\": %lu}\n",
      rank_, num_ranks_, statistics_.requests, statistics_.bytes, statistics_.submits, passed,
      statistics_.completed_early);
  if (std::FILE* file = std::fopen(options_.statistics.c_str(), "a")) {
    std::fwrite(line, 1, static_cast<size_t>(length), file);
    std::fclose(file);
  }
}

}  // namespace gin_loopback
