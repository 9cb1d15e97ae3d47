#include "transport/host_transport.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/testing.h"

namespace ep {
namespace {

void add_signal(char* window, Offset signal, uint64_t value) {
  auto* word = reinterpret_cast<uint64_t*>(window + signal);
  std::atomic_ref<uint64_t>(*word).fetch_add(value, std::memory_order_release);  // pairs with Transport::signal
}

// Carries puts and signals to peers that cannot be reached by stores. One thread picks, at random, what lands next:
// any put that no earlier signal to the same peer holds back, or a signal with no put before it. Sources are read only
// when a put lands, so that a sender that reuses one without flush() is found out.
class SimulatedNetwork {
 public:
  SimulatedNetwork(const HostWindows& windows, uint64_t seed)
      : windows_(windows), random_(seed), is_shuffled_(seed != 0), queues_(8) {
    thread_ = std::thread([this] { run(); });
  }
  ~SimulatedNetwork() { stop(/*drain=*/true); }

  void put(int peer, Offset destination, const void* source, uint64_t bytes) {
    push(peer, {false, destination, source, bytes});
  }
  void signal_add(int peer, Offset signal, uint64_t value) { push(peer, {true, signal, nullptr, value}); }
  void flush() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return num_queued_ == 0 || is_stopping_; });
  }
  void stop(bool drain) {
    {
      std::lock_guard lock(mutex_);
      is_stopping_ = true;
      if (!drain) {
        for (auto& queue : queues_) queue.clear();
        num_queued_ = 0;
      }
    }
    work_.notify_all();
    idle_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Item {
    bool is_signal;
    Offset offset;
    const void* source;
    uint64_t size;  // bytes of a put, value of a signal
  };

  void push(int peer, Item item) {
    {
      std::lock_guard lock(mutex_);
      if (static_cast<size_t>(peer) >= queues_.size()) queues_.resize(peer + 1);
      queues_[peer].push_back(item);
      num_queued_++;
    }
    work_.notify_one();
  }

  // Index of an item of the queue that may land now.
  size_t choose(const std::deque<Item>& queue) {
    if (!is_shuffled_) return 0;
    size_t free = 0;
    while (free < queue.size() && !queue[free].is_signal) free++;
    if (testing::has_bug(testing::Bug::kSignalBeforeData) && free < queue.size()) return free;
    return free == 0 ? 0 : random_() % free;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return num_queued_ > 0 || is_stopping_; });
      if (num_queued_ == 0) return;
      size_t peer = is_shuffled_ ? random_() % queues_.size() : 0;
      while (queues_[peer].empty()) peer = (peer + 1) % queues_.size();
      auto& queue = queues_[peer];
      const size_t index = choose(queue);
      const Item item = queue[index];
      queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(index));
      const bool dawdle = is_shuffled_ && random_() % 64 == 0;
      lock.unlock();
      if (dawdle) std::this_thread::sleep_for(std::chrono::microseconds(50));
      land(static_cast<int>(peer), item);
      lock.lock();
      if (num_queued_ > 0 && --num_queued_ == 0) idle_.notify_all();
    }
  }

  void land(int peer, const Item& item) {
    if (item.is_signal) {
      add_signal(windows_.base(peer), item.offset, item.size);
    } else {
      std::memcpy(windows_.base(peer) + item.offset, item.source, item.size);
    }
  }

  const HostWindows& windows_;
  std::mt19937_64 random_;
  const bool is_shuffled_;
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::vector<std::deque<Item>> queues_;
  size_t num_queued_ = 0;
  bool is_stopping_ = false;
  std::thread thread_;
};

class HostTransport : public Transport {
 public:
  HostTransport(std::unique_ptr<HostWindows> windows, const Topology& topology, uint64_t network_seed)
      : windows_(std::move(windows)), topology_(topology) {
    if (topology_.num_domains() > 1) network_ = std::make_unique<SimulatedNetwork>(*windows_, network_seed);
  }

  const Topology& topology() const override { return topology_; }
  int rank() const override { return windows_->rank(); }
  char* local_window() const override { return windows_->base(rank()); }
  uint64_t window_bytes() const override { return windows_->bytes(); }
  char* peer_ptr(int peer, Offset offset) const override {
    return topology_.is_lsa(rank(), peer) ? windows_->base(peer) + offset : nullptr;
  }
  void put(int peer, Offset destination, const void* source, uint64_t bytes) override {
    if (destination + bytes > window_bytes()) {
      raise(ErrorKind::kInvalidArgument, "a put of ", bytes, " bytes to offset ", destination, " of rank ", peer,
            " leaves its window of ", window_bytes());
    }
    if (char* target = peer_ptr(peer, destination)) {
      std::memcpy(target, source, bytes);
    } else {
      network_->put(peer, destination, source, bytes);
    }
  }
  void signal_add(int peer, Offset signal, uint64_t value) override {
    if (topology_.is_lsa(rank(), peer)) {
      add_signal(windows_->base(peer), signal, value);
    } else {
      network_->signal_add(peer, signal, value);
    }
  }
  void flush() override {
    if (network_) network_->flush();
  }
  void abort() override {
    if (network_) network_->stop(/*drain=*/false);
  }

 private:
  std::unique_ptr<HostWindows> windows_;
  Topology topology_;
  std::unique_ptr<SimulatedNetwork> network_;
};

}  // namespace

std::unique_ptr<Transport> make_host_transport(std::unique_ptr<HostWindows> windows, const Topology& topology,
                                               uint64_t network_seed) {
  return std::make_unique<HostTransport>(std::move(windows), topology, network_seed);
}

}  // namespace ep
